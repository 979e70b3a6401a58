"""What runs at the layers of a base network: all channels under gates, or a fixed choice."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.backbones import Backbone, Runner
from deepmoe.layers import Gates
from deepmoe.ops import add_to_stream, scale_channels
from deepmoe.sparse.convolution import Convolution, cudnn_runs
from deepmoe.sparse.few_inputs import channel_multiple
from deepmoe.sparse.folding import FoldedLayer


class EngineRunner(Runner):
    """What all runners of the engine share."""

    def max_pool(self, x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
        return self.max_pool_gated(x_BCHW, size, stride, padding, None)

    def max_pool_gated(
        self, x_BCHW: Tensor, size: int, stride: int, padding: int, gate_BC: Tensor | None
    ) -> Tensor:
        """Max pooling, the maxima multiplied by gates."""
        if not cudnn_runs(x_BCHW) or not x_BCHW.shape[1]:
            return scale_channels(super().max_pool(x_BCHW, size, stride, padding), gate_BC)
        from deepmoe.sparse import triton_kernels

        x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        return triton_kernels.max_pool(x_BCHW, size, stride, padding, gate_BC)


class FixedRunner(EngineRunner):
    """Runs folded layers as they are, without gates."""

    def __init__(self, layers: Mapping[str, FoldedLayer]) -> None:
        self.convolutions = {p: Convolution(layer) for p, layer in layers.items() if layer.is_conv}
        self.linear = {p: layer for p, layer in layers.items() if not layer.is_conv}
        weights = [layer.weight for layer in layers.values()]
        self.bytes = sum(weight.numel() * weight.element_size() for weight in weights)

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        return self.convolutions[path](x_BCHW)

    def convolve_onto(
        self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor, at: Tensor | None
    ) -> Tensor:
        if at is None:
            return self.convolutions[path](x_BCHW, stream_BCHW)
        return add_to_stream(stream_BCHW, self.convolutions[path](x_BCHW), at)

    def classify(self, path: str, x: Tensor) -> Tensor:
        if path in self.convolutions:
            return self.convolutions[path](x)
        return F.linear(x, self.linear[path].weight, self.linear[path].bias)


class MaskedRunner(EngineRunner):
    """Runs all channels and multiplies them by the gates: dense, whatever the gates are."""

    def __init__(self, fixed: FixedRunner, gates: Gates) -> None:
        self.fixed = fixed
        self.gates = gates

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        return self.fixed.convolutions[path](x_BCHW, gate_BC=self._gate(path))

    def convolve_onto(
        self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor, at: Tensor | None
    ) -> Tensor:
        gate = self._gate(path)
        if gate is None:
            return self.fixed.convolve_onto(path, x_BCHW, stream_BCHW, at)
        return add_to_stream(stream_BCHW, self.convolve(path, x_BCHW), at)

    def convolve_and_pool(self, path: str, x_BCHW: Tensor, size: int, stride: int) -> Tensor:
        # A gate is not negative, so that it may as well multiply the maxima: there are fewer.
        convolved = self.fixed.convolve(path, x_BCHW)
        return self.max_pool_gated(convolved, size, stride, 0, self._gate(path))

    def classify(self, path: str, x: Tensor) -> Tensor:
        return self.fixed.classify(path, x)

    def _gate(self, path: str) -> Tensor | None:
        slot = self.fixed.convolutions[path].layer.out_gate
        return None if slot is None else self.gates[slot]


class SmallNetwork:
    """The physically small network of one route, its gates folded into the weights.

    It starts behind the layers that are the same for all routes.

    Args:
        backbone: how the layers are connected.
        layers: of the whole network.
        gates: of the route: for each gated convolution a vector, zero where a channel is off.
    """

    def __init__(
        self, backbone: Backbone, layers: Mapping[str, FoldedLayer], gates: Sequence[Tensor]
    ) -> None:
        self.backbone = backbone
        weight = next(iter(layers.values())).weight
        multiple = channel_multiple(weight.device, weight.dtype)
        active = [with_idle(g != 0, multiple) for g in gates]
        self.runner = _RoutedRunner(layers_of_route(layers, gates, active), active)

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        return self.runner.bytes

    def __call__(self, x_BCHW: Tensor, size: tuple[int, int]) -> Tensor:
        """Logits, from what the first layers give for images of this size."""
        return self.backbone.wire_gated(x_BCHW, self.runner, size)


def layers_of_route(
    layers: Mapping[str, FoldedLayer], gates: Sequence[Tensor], active: Sequence[Tensor]
) -> dict[str, FoldedLayer]:
    """The layers with their active channels alone, and the gates in their weights."""
    small = {}
    for path, layer in layers.items():
        outs = None if layer.out_gate is None else active[layer.out_gate]
        ins = None if layer.in_gate is None else active[layer.in_gate]
        small[path] = layer.take(outs, ins)
        if layer.out_gate is not None:
            small[path] = _scaled(small[path], gates[layer.out_gate][active[layer.out_gate]])
    return small


def with_idle(active_C: Tensor, multiple: int) -> Tensor:
    """The active channels, and as many others (whose gates make them zero) as make a multiple."""
    on, off = active_C.nonzero().flatten(), (~active_C).nonzero().flatten()
    return torch.cat([on, off[: -len(on) % multiple]]).sort().values


class _RoutedRunner(FixedRunner):
    """A fixed runner whose last convolutions of blocks may have lost outputs."""

    def __init__(self, layers: Mapping[str, FoldedLayer], active: Sequence[Tensor]) -> None:
        super().__init__(layers)
        self.active = active

    def convolve_onto(
        self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor, at: Tensor | None
    ) -> Tensor:
        slot = self.convolutions[path].layer.out_gate
        return super().convolve_onto(
            path, x_BCHW, stream_BCHW, stream_channels(at, slot, self.active)
        )


def stream_channels(at: Tensor | None, slot: int | None, active: Sequence[Tensor]) -> Tensor | None:
    """Which channels of the residual stream a convolution's active outputs belong to."""
    if slot is None:
        return at
    return active[slot] if at is None else at[active[slot]]


def _scaled(layer: FoldedLayer, gate: Tensor) -> FoldedLayer:
    # Gates are not negative, so that they pass through the ReLU.
    factor = gate.to(layer.weight.dtype)
    weight = layer.weight * factor[:, None, None, None]
    return replace(layer, weight=weight, bias=None if layer.bias is None else layer.bias * factor)
