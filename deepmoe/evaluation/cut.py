"""A cheaper model from a trained one: the least important channels go, norms are measured anew."""

import copy

import torch
from torch import Tensor, nn

from deepmoe.costs import Size, count_macs, dense_macs, least
from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches, batches_for
from deepmoe.evaluation.importance import gate_importance
from deepmoe.hard_moe import refuse_experts
from deepmoe.layers import GateHeads
from deepmoe.model import DeepMoE

JUDGED_IMAGES = 2000  # that importance and cost are measured on
REFIT_IMAGES = 4000


def cut_to(model: DeepMoE, size: Size, share: float, batches: Batches, refit: Loader) -> DeepMoE:
    """A copy of lower cost: channels are closed for every image, the least important first.

    Every layer loses about the same share of its channels: that was better than to compare
    importance across layers.

    Args:
        model: with ReLU heads, or a codebook.
        size: of its input images.
        share: of the dense base network's MACs that an image is to cost on average.
        batches: labelled images to judge channels by.
        refit: training images, for the norms.

    Raises:
        UserError: for a model without gates that could be closed, one with exits, or a share out of
            reach.
    """
    refuse_experts(model, "it has no gates, so that its cost can't be changed")
    model.check_ahead()
    if not model.gated:
        raise UserError("a dense network has no gates to close, so its cost can't be changed")
    if not isinstance(model.heads, GateHeads) and model.codebook is None:
        raise UserError("cut closes gates of relu heads or a codebook, and this model has neither")
    if model.exit_at is not None:
        raise UserError(
            "the model's exits were fitted for the whole of it: cut the model without exits, then "
            "fit exits for what is left"
        )
    widths, dense = model.gating.widths, dense_macs(model, size)
    gates_NC, importance_C = _judged(model, batches)
    ranks = [
        of_layer.argsort().argsort() / len(of_layer) for of_layer in importance_C.split(widths)
    ]
    order = torch.cat(ranks).argsort(stable=True)

    def share_without(count: float) -> float:
        left = gates_NC.index_fill(1, order[: int(count)], 0.0).split(widths, dim=1)
        return float(count_macs(model, size, left).double().mean()) / dense

    whole, none = share_without(0), share_without(len(order))
    if not none <= share <= whole:
        raise UserError(
            f"closing channels can't reach {share:g} of the dense MACs: "
            f"this model goes from {whole:.3f} down to {none:.3f}"
        )
    count = least(lambda count: share_without(count) <= share, 0, len(order))
    small = copy.deepcopy(model).eval()
    if isinstance(small.heads, GateHeads):
        small.heads.close(order[: int(count)])
    if small.codebook is not None:
        small.codebook.close(order[: int(count)])
    # Augmented: others have other statistics than the network was trained with.
    refit_norms(small, refit.epoch(0))
    return small


def _judged(model: DeepMoE, batches: Batches) -> tuple[Tensor, Tensor]:
    """Gates of images, and how much each channel matters to them."""
    found, moved = [], []
    for x_BCHW, labels in batches_for(model, batches, JUDGED_IMAGES, "judging channels"):
        with torch.no_grad():
            gates, _ = model.route(x_BCHW)
        assert gates is not None
        found.append(torch.cat(gates, dim=1))
        moved.append(gate_importance(model.network, model.gating, x_BCHW, labels, gates))
    return torch.cat(found), torch.stack(moved).sum(dim=0)


@torch.no_grad()
def refit_norms(model: DeepMoE, batches: Batches) -> None:
    """Measures mean and variance of the base network's layers on given images."""
    norms = [m for m in model.network.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta, seen = [norm.momentum for norm in norms], 0
    for norm in norms:
        norm.reset_running_stats()
    for x_BCHW, _ in batches_for(model, batches, REFIT_IMAGES, "refitting norms"):
        seen += len(x_BCHW)
        for norm in norms:
            norm.train()
            norm.momentum = len(x_BCHW) / seen  # all images count alike
        model(x_BCHW)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
