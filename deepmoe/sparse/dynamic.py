"""Runs the active channels of any route: collects weights as it goes, keeps activations compact."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.graph.running import gates_at, times
from deepmoe.layers import Gates
from deepmoe.ops import scale_channels
from deepmoe.sparse.collect import Collector
from deepmoe.sparse.convolution import convolve, convolve_as_product, is_product
from deepmoe.sparse.direct import DirectConvolution, Forms, direct_runs
from deepmoe.sparse.executors import Executor, FixedExecutor, Selection
from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.planner import Planner, in_words
from deepmoe.sparse.program import Program
from deepmoe.sparse.stream import StreamedWeights, stream_pays

Case = tuple[str, int, int, int, int, int]  # path, images, height, width, densities
ALIKE = ("collect", "direct")  # ways between which layers of one size do not change
PREFERRED = ("stream", "direct", "collect")  # where nothing is measured
MOST_PREPARED = 1000  # direct convolutions, each for a layer and a size
BUCKETS = 8  # densities are told apart in so many steps when the planner is asked


class DynamicNetwork:
    """A base network that runs only the channels a route asks for.

    Args:
        program: of all channels.
        whole: the layers that no gate touches run from here.
        plan: of ways to run each convolution; `None` measures.
    """

    def __init__(
        self,
        program: Program,
        whole: FixedExecutor,
        plan: Mapping[str, str] | None = None,
    ) -> None:
        self.program = program
        self.whole = whole
        self.is_grouped = any(layer.groups > 1 for layer in program.layers.values())
        self.planner: Planner[Case] = Planner(PREFERRED, plan)
        self.decided: dict[tuple[int, ...], tuple[int, str]] = {}  # for each size of inputs
        self.collector = Collector()
        self.direct: dict[tuple[str, tuple[int, ...]], DirectConvolution] = {}
        self.forms: Forms = {}  # of the inputs of direct convolutions
        self.streamed: dict[str, StreamedWeights] = {}
        self.by_input: dict[str, Tensor] = {}  # weights of 1x1 convolutions, the other way round

    def __call__(self, x_BCHW: Tensor, gates: Gates, size: tuple[int, int]) -> Tensor:
        """Logits of images that all take the same route: their gates are zero at the same places.

        Args:
            x_BCHW: what the layers before the first gate give.
            gates: of these images.
            size: of the images.
        """
        return self.program.go_on(_DynamicExecutor(self, gates, x_BCHW.dtype), x_BCHW, size)

    def way_of(self, case: Case) -> str | None:
        """How a case is run, once that is decided.

        Collecting and direct convolutions leave their results in different memory formats. So all
        layers with inputs of one size take the way that is faster for them together.
        """
        planner, size = self.planner, case[1:4]
        own = planner.chosen.get(case)
        if own not in ALIKE or planner.plan is not None or not self._may_change(case):
            return own
        if self.decided.get(size, (0, ""))[0] != len(planner.chosen):
            alike = [c for c, way in planner.chosen.items() if way in ALIKE]
            same_size = [c for c in alike if c[1:4] == size]
            cases = [c for c in same_size if self._may_change(c)]
            totals = {way: sum(planner.median(c, way) for c in cases) for way in ALIKE}
            best = min(totals, key=lambda way: totals[way])
            self.decided[size] = (len(planner.chosen), best)
        return self.decided[size][1]

    def _may_change(self, case: Case) -> bool:
        return all(way in self.planner.times[case] for way in ALIKE)

    @property
    def plan(self) -> dict[str, str]:
        """How the cases that came up are run, as far as that is decided."""
        ways = {case: self.way_of(case) for case in self.planner.chosen}
        return {in_words(case): way for case, way in ways.items() if way is not None}

    def direct_convolution(self, path: str, size: tuple[int, ...]) -> DirectConvolution:
        """What runs a layer on its weights as they are, made on first use."""
        key = (path, size)
        if len(self.direct) > MOST_PREPARED:  # images of ever new sizes
            self.direct.clear()
            self.forms.clear()
        if key not in self.direct:
            self.direct[key] = DirectConvolution(self.program.layers[path], size, self.forms)
        return self.direct[key]

    def weight_by_input(self, path: str) -> Tensor:
        """A 1x1 convolution's weights with a row for each input, made on first use."""
        if path not in self.by_input:
            self.by_input[path] = self.program.layers[path].weight.flatten(1).T.contiguous()
        return self.by_input[path]

    def streamed_weights(self, path: str) -> StreamedWeights:
        """The layer's weights in the layout that is read row by row, made on first use."""
        if path not in self.streamed:
            self.streamed[path] = StreamedWeights(self.program.layers[path])
        return self.streamed[path]


class _DynamicExecutor(Executor):
    """One pass through the network for one route.

    Args:
        network: to run.
        gates: of images that are zero at the same places.
        dtype: that kernels take gates to have.
    """

    def __init__(self, network: DynamicNetwork, gates: Gates, dtype: torch.dtype) -> None:
        self.network, self.program = network, network.program
        self.gates = gates
        active = [_at_least_one(g[0].nonzero().flatten()) for g in gates]
        self.select = Selection(active, [g.shape[1] for g in gates])
        self.values = [g.index_select(1, a).to(dtype) for g, a in zip(gates, active, strict=True)]

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        return self._run(path, x_BCHW, None)

    def convolve_onto(self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor) -> Tensor:
        return self._run(path, x_BCHW, stream_BCHW)

    def max_pool(self, x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
        # On a CPU, PyTorch takes the maxima of many channels at once in this format only.
        x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        return super().max_pool(x_BCHW, size, stride, padding)

    def linear(self, path: str, x: Tensor) -> Tensor:
        layer = self.program.layers[path]
        if not layer.gated:
            return self.network.whole.linear(path, x)
        outs, ins = self.select(layer.outs), self.select(layer.ins)
        weight = self.network.collector.collect(layer.weight[:, :, None, None], outs, ins)
        bias = layer.bias
        if bias is not None and outs is not None:
            bias = bias.index_select(0, outs)
        return F.linear(x, weight.flatten(1), bias)

    def norm(self, path: str, x_BCHW: Tensor) -> Tensor:
        norm = self.program.norms[path]
        return norm.take(self.select(norm.channels))(x_BCHW)

    def parameter(self, name: str) -> Tensor:
        parameter = self.program.parameters[name]
        return parameter.take(self.select(parameter.channels))

    def gate(self, site: int, x: Tensor) -> Tensor:
        where = self.program.sites[site]
        assert where is not None
        if len(where.pieces) == 1 and where.pieces[0] is not None:
            return times(x, self.values[where.pieces[0]], where.dim)
        layer = list(self.program.layers.values())[site]
        running = self.select(layer.ins)
        assert running is not None
        return times(x, gates_at(where, self.gates).index_select(1, running), where.dim)

    def _run(self, path: str, x_BCHW: Tensor, onto: Tensor | None) -> Tensor:
        layer = self.program.layers[path]
        if not layer.gated:
            whole = self.network.whole
            if onto is None:
                return whole.convolve(path, x_BCHW)
            return whole.convolve_onto(path, x_BCHW, onto)
        outs, ins = self.select(layer.outs), self.select(layer.ins)
        gate = None if layer.scale is None else self.values[layer.scale]
        call = _Call(self.network, path, layer, x_BCHW, onto, outs, ins, gate)
        if self.network.is_grouped:
            # Grouped convolutions like channels last; to go back and forth would take longer.
            return call.by_collecting()
        case = (
            path,
            *x_BCHW.shape[::2],
            x_BCHW.shape[3],
            _step(ins, layer, 1),
            _step(outs, layer, 0),
        )
        way = self.network.way_of(case)
        if way is not None:
            return WAYS[way](call)
        ways = {name: partial(WAYS[name], call) for name in call.ways()}
        return self.network.planner.run(case, ways, x_BCHW.device)


def _at_least_one(active: Tensor) -> Tensor:
    """A unit runs where none has to: its gate is zero, and layers without channels are trouble."""
    return active if len(active) else active.new_zeros(1)


class _Call(NamedTuple):
    """One convolution of active channels, as it is to be run."""

    network: DynamicNetwork
    path: str
    layer: FoldedLayer
    x_BCHW: Tensor
    onto: Tensor | None
    outs: Tensor | None
    ins: Tensor | None
    gate: Tensor | None

    def ways(self) -> list[str]:
        """What is worth a trial."""
        ways = ["collect"]
        if direct_runs(self.layer, self.x_BCHW):
            ways.append("direct")
        if stream_pays(self.layer, self.x_BCHW):
            ways.append("stream")
        return ways

    def by_collecting(self) -> Tensor:
        x = self.x_BCHW.contiguous(memory_format=torch.channels_last)
        layer, outs = self.layer, self.outs
        if is_product(layer, x):
            bias = layer.bias
            bias = bias if bias is None or outs is None else bias.index_select(0, outs)
            y = convolve_as_product(self._weight_OI(), bias, layer.activation, x, self.onto)
        elif layer.groups > 1:
            layer = layer.take(outs, None)
            y = convolve(layer, layer.weight, x, self.onto)
        else:
            weight = self.network.collector.collect(layer.weight, outs, self.ins)
            if outs is not None and layer.bias is not None:
                layer = replace(layer, bias=layer.bias.index_select(0, outs))
            y = convolve(layer, weight, x, self.onto)
        return scale_channels(y, self.gate)

    def _weight_OI(self) -> Tensor:
        """The active weights of a convolution that is a product."""
        if self.outs is None and self.ins is not None:
            # Whole rows are copied faster than single numbers out of each.
            return self.network.weight_by_input(self.path).index_select(0, self.ins).T
        return self.network.collector.collect(self.layer.weight, self.outs, self.ins).flatten(1)

    def directly(self) -> Tensor:
        direct = self.network.direct_convolution(self.path, self.x_BCHW.shape[2:])
        return direct(self.x_BCHW, self.onto, self.outs, self.ins, self.gate)

    def by_streaming(self) -> Tensor:
        streamed = self.network.streamed_weights(self.path)
        return streamed(self.layer, self.x_BCHW, self.onto, self.outs, self.ins, self.gate)


WAYS = {"collect": _Call.by_collecting, "direct": _Call.directly, "stream": _Call.by_streaming}


def _step(channels: Tensor | None, layer: FoldedLayer, side: int) -> int:
    if channels is None:
        return BUCKETS
    return round(BUCKETS * channels.shape[0] / layer.weight.shape[side])
