"""What channels are worth to the layers that read them, by their weights alone."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deepmoe.graph.gating import Gating


def have_norms(network: nn.Module, gating: Gating) -> list[bool]:
    """For each gated group, whether batch norms scale all of its units."""
    counts = torch.zeros(gating.graph.offsets[-1] + 1, dtype=torch.int64, device="cpu")
    for units, _ in _scales(network, gating):
        counts[units] += 1
    return [bool(part.all()) for part in gating.by_group(counts)]


@torch.no_grad()
def norm_scales(network: nn.Module, gating: Gating) -> list[Tensor | None]:
    """How much batch norm scales the units of each gated group; the mean where several do.

    `None` for a group with units that no batch norm scales.
    """
    sums, counts = (torch.zeros(gating.graph.offsets[-1] + 1) for _ in range(2))
    for units, scales in _scales(network, gating):
        sums.index_add_(0, units % len(sums), scales.abs().float().cpu())
        counts.index_add_(0, units % len(sums), torch.ones(len(units)))
    return [
        s / c if bool(c.all()) else None
        for s, c in zip(gating.by_group(sums), gating.by_group(counts), strict=True)
    ]


def _scales(network: nn.Module, gating: Gating) -> Iterator[tuple[Tensor, Tensor]]:
    """The scales of each batch norm, and the units that they are of."""
    for path, module in network.named_modules():
        units = gating.graph.followers.get(f"{path}.running_mean")
        if units is not None and module.weight is not None:
            yield units, module.weight


@torch.no_grad()
def channel_strengths(network: nn.Module, gating: Gating) -> list[Tensor]:
    """How much the units of each gated group matter to the layers behind.

    The scale that batch norm gives a unit, times the norm of the weights that read it.
    """
    units = gating.graph.offsets[-1] + 1  # the last one is of channels that belong to none
    squares = torch.zeros(units)
    for layer in gating.graph.layers:
        if not layer.passes_on:
            weight = network.get_submodule(layer.path).weight
            assert isinstance(weight, Tensor)
            read = weight.transpose(0, 1).flatten(1).float().square().sum(dim=1).cpu()
            squares.index_add_(0, layer.ins % units, read)
    read_by = gating.by_group(squares.sqrt())
    scales = norm_scales(network, gating)
    return [r if s is None else s * r for s, r in zip(scales, read_by, strict=True)]


@torch.no_grad()
def scale_inputs(network: nn.Module, gating: Gating, factors_C: Tensor) -> None:
    """Multiplies what layers read, in their weights: as gates of these values would.

    Args:
        network: is changed.
        gating: of the network.
        factors_C: one for each gate, of all groups side by side.
    """
    factors_C = factors_C.detach().cpu()
    for layer in gating.graph.layers:
        numbers = gating.gate_of_unit[layer.ins]
        if not layer.passes_on and bool((numbers >= 0).any()):
            weight = network.get_submodule(layer.path).weight
            assert isinstance(weight, Tensor)
            factors = torch.where(numbers >= 0, factors_C[numbers], 1.0).to(weight)
            weight.mul_(factors.view(1, -1, *[1] * (weight.dim() - 2)))
