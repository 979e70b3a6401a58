"""Static pruning: the least important channels go for good, as many as a cost asks for.

Which channels go is the same for all images. How many go from which group follows from what they
are worth for each MAC that they cost. First-order importance overstates how much groups differ once
most channels are gone, so that the widths taken lie between that and the same share of every group.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from deepmoe.config import TrainConfig
from deepmoe.costs import Size, cost_matrix, least, macs_of_counts, marginal_macs
from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.evaluation.importance import channel_importance
from deepmoe.graph import Gating, channel_strengths, prunable
from deepmoe.hard_moe import refuse_experts
from deepmoe.model import DeepMoE

JUDGED_IMAGES = 4096
FEWEST = 1 / 32  # of a group's channels, that stay whatever they are worth
MOST_MULTIPLE = 8  # that widths are kept at: odd ones are slow on many devices


@torch.no_grad()
def prune(
    model: DeepMoE,
    size: Size,
    share: float,
    judged_by: Loader,
    *,
    by: Literal["taylor", "strength"] = TrainConfig.prune_by,
    tilt: float = TrainConfig.prune_tilt,
) -> DeepMoE:
    """A smaller network, with the weights of the channels that stay.

    Args:
        model: without gates; they would not fit the channels that are left.
        size: of its input images.
        share: of the base network's MACs that is to be left.
        judged_by: labelled training images.
        by: `taylor`: how much the loss would change without a channel; `strength`: its weights.
        tilt: how far groups may differ in the share of channels they keep, from 0 to 1.

    Returns:
        A model with its own copy of the network's weights; an embedding is shared.

    Raises:
        UserError: for a gated or pruned model, or a share that can't be reached.
    """
    refuse_experts(model, "prune the network that they start from")
    if model.gated:
        raise UserError("a gated model can't be pruned: prune the network, then gate what is left")
    if model.unpruned is not None:
        raise UserError("this network is pruned already: prune the one that it was made of")
    gating = prunable(model.gating.graph)
    if by == "taylor":
        importance = channel_importance(model, gating, judged_by.epoch(0), JUDGED_IMAGES)
    else:
        importance = torch.cat(channel_strengths(model.network, gating)).double()
    parts = importance.split(list(gating.widths))
    kept = widths_for(gating, size, parts, share, tilt)
    masks = []
    for part, count in zip(parts, kept, strict=True):
        strongest = part.argsort(descending=True, stable=True)[:count]
        masks.append(torch.zeros(len(part), dtype=torch.bool).index_fill_(0, strongest, True))
    network, left, _ = gating.narrow(model.network, masks)
    small = DeepMoE(
        model.embedding,
        None,
        network.train(model.training),
        Gating(left.graph, model.gating.gated),
        source=replace(model.source, kept=kept),
        exit_at=model.exit_at,
        unpruned=model.gating.graph,
    )
    small.training = model.training  # its parts keep their own modes
    return small


def widths_for(
    gating: Gating, size: Size, importance: Sequence[Tensor], share: float, tilt: float
) -> tuple[int, ...]:
    """How many channels to keep of each group, so that a share of the MACs is left.

    Args:
        gating: covers the groups.
        size: of input images.
        importance: of each group's channels.
        share: of the network's MACs.
        tilt: as of `prune`.
    """
    quadratic = cost_matrix(gating, size)
    full = torch.tensor(gating.widths, dtype=torch.float64)

    def macs(widths: Tensor) -> float:
        return macs_of_counts(widths[None], quadratic).item()

    target = share * macs(full)
    relative = _by_worth(quadratic, full, importance, target) / full

    def shrunk(divisor: float) -> Tensor:
        return _rounded(full, full * relative**tilt / divisor)

    fewest = shrunk(float("inf"))
    if not macs(fewest) <= target <= macs(full):
        raise UserError(
            f"pruning can't leave {share:g} of the MACs: "
            f"this network goes from 1 down to {macs(fewest) / macs(full):.3f}"
        )
    whole, tiny = float(relative.min()) ** tilt, 2.0 * float(full.max())
    divisor = least(lambda divisor: macs(shrunk(divisor)) <= target, whole, tiny)
    return tuple(shrunk(divisor).long().tolist())


def _by_worth(
    quadratic: Tensor, full: Tensor, importance: Sequence[Tensor], target: float
) -> Tensor:
    """Widths when channels go one by one, always the one that is worth least for its cost."""
    weakest_first = [part.sort().values.tolist() for part in importance]
    widths, fewest = full.clone(), (full * FEWEST).clamp_min(1)
    while macs_of_counts(widths[None], quadratic).item() > target:
        costs = marginal_macs(quadratic, widths).tolist()
        removed = (full - widths).long().tolist()
        worth = [
            values[gone] / max(cost, 1.0) if width > least_width else float("inf")
            for values, gone, cost, width, least_width in zip(
                weakest_first, removed, costs, widths.tolist(), fewest.tolist(), strict=True
            )
        ]
        cheapest = min(range(len(worth)), key=worth.__getitem__)
        if worth[cheapest] == float("inf"):
            break
        widths[cheapest] -= 1
    return widths


def _rounded(full: Tensor, wanted: Tensor) -> Tensor:
    """Widths that a device likes, not above the full ones."""
    powers = (full / 16).clamp(1, MOST_MULTIPLE).log2().floor()  # small groups have none to spare
    multiple = 2**powers
    fewest = torch.minimum(full, (full * FEWEST / multiple).ceil().clamp_min(1) * multiple)
    return torch.minimum(full, torch.maximum(fewest, (wanted / multiple).round() * multiple))
