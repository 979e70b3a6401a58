"""How much each channel matters to a trained network: what the loss would feel of its gate."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.evaluation.batches import Batches, batches_for
from deepmoe.graph import Gating
from deepmoe.layers import Gates
from deepmoe.model import DeepMoE
from deepmoe.processes import sum_over_processes

TEMPERATURE = 4.0  # a network that knows its images by heart has no gradient at 1


def gate_importance(
    network: nn.Module, gating: Gating, x_BCHW: Tensor, labels: Tensor, gates: Gates
) -> Tensor:
    """The sum over images of |gate * d loss / d gate|, for all gates side by side.

    To first order, that is how much the loss changes where the gate is closed: the Taylor
    importance of its channel.

    Args:
        network: in evaluation mode.
        gating: of the network.
        x_BCHW: images.
        labels: of the images.
        gates: of the images, for each gated group.
    """
    with torch.enable_grad():
        gates = tuple(g.detach().requires_grad_() for g in gates)
        logits = gating(network, x_BCHW, gates).float()
        loss = F.cross_entropy(logits / TEMPERATURE, labels, reduction="sum")
    slopes = torch.autograd.grad(loss, gates)
    moved = torch.cat([g.detach() * slope for g, slope in zip(gates, slopes, strict=True)], dim=1)
    return moved.abs().sum(dim=0)


@torch.no_grad()
def channel_importance(model: DeepMoE, gating: Gating, batches: Batches, most: int) -> Tensor:
    """The importance of every channel that a gating covers, all of them being open.

    Args:
        model: whose base network is judged, without its own gates.
        gating: of that network, such as `prunable(graph)`.
        batches: labelled images.
        most: how many of the images to look at, in each process; several add up theirs.
    """
    total = torch.zeros(sum(gating.widths), dtype=torch.float64)
    for x_BCHW, labels in batches_for(model, batches, most):
        ones = tuple(x_BCHW.new_ones(len(x_BCHW), width) for width in gating.widths)
        total += gate_importance(model.network, gating, x_BCHW, labels, ones).double().cpu()
    device = next(model.parameters()).device
    return sum_over_processes(total.to(device)).cpu()
