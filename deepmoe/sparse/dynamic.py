"""Runs the active channels of any route: collects weights as it goes, keeps activations compact."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.backbones import Backbone
from deepmoe.layers import Gates
from deepmoe.ops import add_to_stream, scale_channels
from deepmoe.sparse.collect import Collector
from deepmoe.sparse.convolution import convolve
from deepmoe.sparse.direct import DirectConvolution, Forms, direct_runs
from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.planner import Planner, in_words
from deepmoe.sparse.runners import EngineRunner, FixedRunner, stream_channels
from deepmoe.sparse.stream import StreamedWeights, stream_pays

Case = tuple[str, int, int, int, int, int]  # path, images, height, width, densities
ALIKE = ("collect", "direct")  # ways between which layers of one size do not change
PREFERRED = ("stream", "direct", "collect")  # where nothing is measured
MOST_PREPARED = 1000  # direct convolutions, each for a layer and a size
BUCKETS = 8  # densities are told apart in so many steps when the planner is asked


class DynamicNetwork:
    """A base network that runs only the channels a route asks for.

    Args:
        backbone: how the layers are connected.
        layers: all channels.
        whole: the layers that no gate touches run from here.
        plan: of ways to run each convolution; `None` measures.
    """

    def __init__(
        self,
        backbone: Backbone,
        layers: Mapping[str, FoldedLayer],
        whole: FixedRunner,
        plan: Mapping[str, str] | None = None,
    ) -> None:
        self.backbone = backbone
        self.layers = layers
        self.whole = whole
        self.planner: Planner[Case] = Planner(PREFERRED, plan)
        self.decided: dict[tuple[int, ...], tuple[int, str]] = {}  # for each size of inputs
        self.collector = Collector()
        self.direct: dict[tuple[str, tuple[int, ...]], DirectConvolution] = {}
        self.forms: Forms = {}  # of the inputs of direct convolutions
        self.streamed: dict[str, StreamedWeights] = {}

    def __call__(self, x_BCHW: Tensor, gates: Gates, size: tuple[int, int]) -> Tensor:
        """Logits of images that all take the same route: their gates are zero at the same places.

        Args:
            x_BCHW: what the layers before the first gate give.
            gates: of these images.
            size: of the images.
        """
        active = [g[0].nonzero().flatten() for g in gates]
        dtype = x_BCHW.dtype  # which kernels take gates to have
        values = [g.index_select(1, a).to(dtype) for g, a in zip(gates, active, strict=True)]
        return self.backbone.wire_gated(x_BCHW, _DynamicRunner(self, active, values), size)

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
            self.direct[key] = DirectConvolution(self.layers[path], size, self.forms)
        return self.direct[key]

    def streamed_weights(self, path: str) -> StreamedWeights:
        """The layer's weights in the layout that is read row by row, made on first use."""
        if path not in self.streamed:
            self.streamed[path] = StreamedWeights(self.layers[path])
        return self.streamed[path]


class _DynamicRunner(EngineRunner):
    """One pass through the network for one route."""

    def __init__(
        self, network: DynamicNetwork, active: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        self.network = network
        self.active = active
        self.values = values

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        layer = self.network.layers[path]
        if layer.in_gate is None and layer.out_gate is None:
            return self.network.whole.convolve(path, x_BCHW)
        return self._run(path, layer, x_BCHW, None)

    def convolve_onto(
        self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor, at: Tensor | None
    ) -> Tensor:
        layer = self.network.layers[path]
        if layer.in_gate is None and layer.out_gate is None:
            return self.network.whole.convolve_onto(path, x_BCHW, stream_BCHW, at)
        if layer.out_gate is None and at is None:
            return self._run(path, layer, x_BCHW, stream_BCHW)
        y = self._run(path, layer, x_BCHW, None)
        return add_to_stream(stream_BCHW, y, stream_channels(at, layer.out_gate, self.active))

    def max_pool(self, x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
        # On a CPU, PyTorch takes the maxima of many channels at once in this format only.
        x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        return super().max_pool(x_BCHW, size, stride, padding)

    def classify(self, path: str, x: Tensor) -> Tensor:
        layer = self.network.layers[path]
        if layer.in_gate is None:
            return self.network.whole.classify(path, x)
        return F.linear(x, layer.weight.index_select(1, self.active[layer.in_gate]), layer.bias)

    def _run(self, path: str, layer: FoldedLayer, x_BCHW: Tensor, onto: Tensor | None) -> Tensor:
        outs = None if layer.out_gate is None else self.active[layer.out_gate]
        ins = None if layer.in_gate is None else self.active[layer.in_gate]
        gate = None if layer.out_gate is None else self.values[layer.out_gate]
        if not x_BCHW.shape[1] or (outs is not None and not outs.shape[0]):
            small = layer.take(outs, ins)
            return scale_channels(convolve(small, small.weight, x_BCHW, onto), gate)
        call = _Call(self.network, path, layer, x_BCHW, onto, outs, ins, gate)
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
        weight = self.network.collector.collect(self.layer.weight, self.outs, self.ins)
        layer = self.layer
        if self.outs is not None and layer.bias is not None:
            layer = replace(layer, bias=layer.bias.index_select(0, self.outs))
        return scale_channels(convolve(layer, weight, x, self.onto), self.gate)

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
