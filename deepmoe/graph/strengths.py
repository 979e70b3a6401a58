"""What channels are worth to the layers that read them, by their weights alone."""

import torch
from torch import Tensor, nn

from deepmoe.graph.gating import Gating


@torch.no_grad()
def channel_strengths(network: nn.Module, gating: Gating) -> list[Tensor]:
    """How much the units of each gated group matter to the layers behind.

    The scale that batch norm gives a unit, times the norm of the weights that read it.
    """
    units = gating.graph.offsets[-1] + 1  # the last one is of channels that belong to none
    scale, norms, squares = torch.zeros(units), torch.zeros(units), torch.zeros(units)
    for path, module in network.named_modules():
        followed = gating.graph.followers.get(f"{path}.running_mean")
        if followed is not None and module.weight is not None:
            scale.index_add_(0, followed % units, module.weight.abs().float().cpu())
            norms.index_add_(0, followed % units, torch.ones(len(followed)))
    for layer in gating.graph.layers:
        if not layer.passes_on:
            weight = network.get_submodule(layer.path).weight
            assert isinstance(weight, Tensor)
            read = weight.transpose(0, 1).flatten(1).float().square().sum(dim=1).cpu()
            squares.index_add_(0, layer.ins % units, read)
    scale = torch.where(norms > 0, scale / norms.clamp_min(1), 1.0)
    strengths = scale * squares.sqrt()
    starts = [gating.graph.offsets[number] for number in gating.gated]
    return [strengths[s : s + w] for s, w in zip(starts, gating.widths, strict=True)]


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
