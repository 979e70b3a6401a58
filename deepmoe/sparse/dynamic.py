"""Runs the active channels of any route: collects weights as it goes, keeps activations compact."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.backbones import Backbone
from deepmoe.layers import Gates
from deepmoe.ops import onto_stream, scale_channels
from deepmoe.sparse.collect import Collector
from deepmoe.sparse.convolution import convolve, convolve_plainly, multiply
from deepmoe.sparse.direct import DirectConvolution
from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.planner import Planner
from deepmoe.sparse.runners import FixedRunner, stream_channels
from deepmoe.sparse.stream import StreamedWeights, few_positions, stream_pays

BUCKETS = 8  # densities are told apart in so many steps when the planner is asked


class DynamicNetwork:
    """A base network that runs only the channels a route asks for.

    Args:
        backbone: how the layers are connected.
        layers: all channels.
        whole: the layers that no gate touches run from here.
    """

    def __init__(
        self, backbone: Backbone, layers: Mapping[str, FoldedLayer], whole: FixedRunner
    ) -> None:
        self.backbone = backbone
        self.layers = layers
        self.whole = whole
        self.planner = Planner()  # of ways to run each convolution
        self.collector = Collector()
        self.direct = DirectConvolution()
        self.streamed: dict[str, StreamedWeights] = {}
        self.transposed: dict[str, Tensor] = {}

    def __call__(self, x_BCHW: Tensor, gates: Gates) -> Tensor:
        """Logits of images that all take the same route: their gates are zero at the same places.

        Args:
            x_BCHW: the images.
            gates: of these images.
        """
        active = [g[0].nonzero().flatten() for g in gates]
        values = [g.index_select(1, a) for g, a in zip(gates, active, strict=True)]
        return self.backbone.wire(x_BCHW, _DynamicRunner(self, active, values))

    def transposed_weights(self, path: str) -> Tensor:
        """The weights of a 1x1 convolution with inputs as rows, so that taking some is a copy."""
        if path not in self.transposed:
            self.transposed[path] = self.layers[path].weight.flatten(1).T.contiguous()
        return self.transposed[path]

    def streamed_weights(self, path: str) -> StreamedWeights:
        """The layer's weights in the layout that is read row by row, made on first use."""
        if path not in self.streamed:
            self.streamed[path] = StreamedWeights(self.layers[path])
        return self.streamed[path]


class _DynamicRunner:
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
        return onto_stream(stream_BCHW, y, stream_channels(at, layer.out_gate, self.active))

    def classify(self, path: str, x: Tensor) -> Tensor:
        layer = self.network.layers[path]
        if layer.in_gate is None:
            return self.network.whole.classify(path, x)
        return F.linear(x, layer.weight.index_select(1, self.active[layer.in_gate]), layer.bias)

    def _gate(self, layer: FoldedLayer) -> Tensor | None:
        return None if layer.out_gate is None else self.values[layer.out_gate]

    def _run(self, path: str, layer: FoldedLayer, x_BCHW: Tensor, onto: Tensor | None) -> Tensor:
        outs = None if layer.out_gate is None else self.active[layer.out_gate]
        ins = None if layer.in_gate is None else self.active[layer.in_gate]
        if not x_BCHW.shape[1] or (outs is not None and not len(outs)):
            small = layer.take(outs, ins)
            return scale_channels(convolve(small, small.weight, x_BCHW, onto), self._gate(layer))
        ways = self._ways(path, layer, x_BCHW, onto, outs, ins)
        images, _, height, width = x_BCHW.shape
        case = (path, images, height, width, _step(ins, layer, 1), _step(outs, layer, 0))
        return self.network.planner.run(case, ways, x_BCHW.device)

    def _ways(
        self,
        path: str,
        layer: FoldedLayer,
        x_BCHW: Tensor,
        onto: Tensor | None,
        outs: Tensor | None,
        ins: Tensor | None,
    ) -> dict[str, Callable[[], Tensor]]:
        network, gate = self.network, self._gate(layer)

        def small() -> FoldedLayer:
            if outs is None or layer.bias is None:
                return layer
            return replace(layer, bias=layer.bias.index_select(0, outs))

        def channels_last() -> Tensor:
            x = x_BCHW.contiguous(memory_format=torch.channels_last)
            weight = network.collector.collect(layer.weight, outs, ins, channels_last=True)
            return scale_channels(convolve(small(), weight, x, onto), gate)

        def contiguous() -> Tensor:
            weight = network.collector.collect(layer.weight, outs, ins, channels_last=False)
            y = convolve_plainly(small(), weight, x_BCHW.contiguous(), onto)
            return scale_channels(y, gate)

        def streamed() -> Tensor:
            y = network.streamed_weights(path)(small(), x_BCHW, onto, outs, ins)
            return scale_channels(y, gate)

        def direct() -> Tensor:
            return network.direct(layer, x_BCHW, onto, outs, ins, gate)

        def product() -> Tensor:
            assert ins is not None
            rows = network.transposed_weights(path).index_select(0, ins)
            return multiply(layer, rows, x_BCHW, onto)

        ways = {"collect, channels last": channels_last}
        if x_BCHW.is_cuda:
            return ways
        if ins is not None and outs is None and _is_product(layer):
            ways["product"] = product
        # Elsewhere all layers keep to one memory format: changing it would cost more than it gains.
        if few_positions(layer, x_BCHW):
            ways["collect"] = contiguous
        if stream_pays(layer, x_BCHW):
            ways["stream"] = streamed
        if network.direct.runs(layer, x_BCHW, len(layer.weight) if outs is None else len(outs)):
            ways["direct"] = direct
        return ways


def _is_product(layer: FoldedLayer) -> bool:
    """Whether a convolution is a matrix product at every position."""
    return layer.weight.shape[2:] == (1, 1) and set(layer.stride) == {1}


def _step(channels: Tensor | None, layer: FoldedLayer, side: int) -> int:
    if channels is None:
        return BUCKETS
    return round(BUCKETS * len(channels) / layer.weight.shape[side])
