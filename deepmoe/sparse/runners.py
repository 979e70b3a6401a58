"""What runs at the layers of a base network: all channels under gates, or a fixed choice."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.backbones import Backbone
from deepmoe.layers import Gates
from deepmoe.ops import onto_stream, scale_channels
from deepmoe.sparse.convolution import Convolution
from deepmoe.sparse.folding import FoldedLayer


class FixedRunner:
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
        return onto_stream(stream_BCHW, self.convolutions[path](x_BCHW), at)

    def pool(self, x_BCHW: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        return F.max_pool2d(x_BCHW, kernel, stride, padding)

    def classify(self, path: str, x: Tensor) -> Tensor:
        if path in self.convolutions:
            return self.convolutions[path](x)
        return F.linear(x, self.linear[path].weight, self.linear[path].bias)


class MaskedRunner:
    """Runs all channels and multiplies them by the gates: dense, whatever the gates are."""

    def __init__(self, fixed: FixedRunner, gates: Gates) -> None:
        self.fixed = fixed
        self.gates = gates

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        return scale_channels(self.fixed.convolve(path, x_BCHW), self._gate(path))

    def convolve_onto(
        self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor, at: Tensor | None
    ) -> Tensor:
        gate = self._gate(path)
        if gate is None:
            return self.fixed.convolve_onto(path, x_BCHW, stream_BCHW, at)
        y = scale_channels(self.fixed.convolve(path, x_BCHW), gate)
        return onto_stream(stream_BCHW, y, at)

    def pool(self, x_BCHW: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        return self.fixed.pool(x_BCHW, kernel, stride, padding)

    def classify(self, path: str, x: Tensor) -> Tensor:
        return self.fixed.classify(path, x)

    def _gate(self, path: str) -> Tensor | None:
        slot = self.fixed.convolutions[path].layer.out_gate
        return None if slot is None else self.gates[slot]


class SmallNetwork:
    """The physically small network of one route, its gates folded into the weights.

    Args:
        backbone: how the layers are connected.
        layers: of the whole network.
        gates: of the route: for each gated convolution a vector, zero where a channel is off.
    """

    def __init__(
        self, backbone: Backbone, layers: Mapping[str, FoldedLayer], gates: Sequence[Tensor]
    ) -> None:
        self.backbone = backbone
        active = [g.nonzero().flatten() for g in gates]
        self.runner = _RoutedRunner(layers_of_route(layers, gates), active)

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        return self.runner.bytes

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        return self.backbone.wire(x_BCHW, self.runner)


def layers_of_route(
    layers: Mapping[str, FoldedLayer], gates: Sequence[Tensor]
) -> dict[str, FoldedLayer]:
    """The layers with their active channels alone, and the gates in their weights."""
    active = [g.nonzero().flatten() for g in gates]
    small = {}
    for path, layer in layers.items():
        outs = None if layer.out_gate is None else active[layer.out_gate]
        ins = None if layer.in_gate is None else active[layer.in_gate]
        small[path] = layer.take(outs, ins)
        if layer.out_gate is not None:
            small[path] = _scaled(small[path], gates[layer.out_gate][active[layer.out_gate]])
    return small


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


def parts_by_route(gates: Gates) -> list[Tensor]:
    """The images of a batch, grouped by which channels they run."""
    if len(gates[0]) == 1:
        return [torch.zeros(1, dtype=torch.long, device=gates[0].device)]
    patterns = torch.cat([g > 0 for g in gates], dim=1)
    # One number stands for a pattern: sorting whole patterns takes longer than the network.
    generator = torch.Generator(patterns.device).manual_seed(0)
    keys = torch.randint(2**62, (patterns.shape[1],), generator=generator, device=patterns.device)
    numbers = (patterns * keys).sum(dim=1)
    parts = list(images_by_number(numbers).values())
    order = torch.cat(parts)
    alike = numbers[order[1:]] == numbers[order[:-1]]
    equal = (patterns[order[1:]] == patterns[order[:-1]]).all(dim=1)
    if (equal | ~alike).all():
        return parts
    _, member = patterns.unique(dim=0, return_inverse=True)  # two patterns had the same number
    return list(images_by_number(member).values())


def images_by_number(numbers_B: Tensor) -> dict[int, Tensor]:
    """For each number that comes up, the images that have it, in order."""
    order = numbers_B.argsort(stable=True)
    numbers, counts = numbers_B.unique(return_counts=True)
    return dict(zip(numbers.tolist(), order.split(counts.tolist()), strict=True))


def in_order(outputs: list[Tensor], parts: list[Tensor]) -> Tensor:
    """Outputs of parts of a batch as those of the batch."""
    joined, images = torch.cat(outputs), torch.cat(parts)
    return torch.empty_like(joined).index_copy_(0, images, joined)
