"""Static pruning: the least important channels go for good, as many as a cost asks for.

Which channels go is the same for all images, and a method of `deepmoe.compare` decides it.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmoe.compare import SELECTORS, PruningTask
from deepmoe.config import PruneBy, TrainConfig
from deepmoe.costs import Size
from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.evaluation.cut import refit_norms
from deepmoe.graph import Gating, check_kept, prunable
from deepmoe.hard_moe import refuse_experts
from deepmoe.model import DeepMoE


@torch.no_grad()
def prune(
    model: DeepMoE,
    size: Size,
    share: float | None,
    judged_by: Loader,
    *,
    by: PruneBy = TrainConfig.prune_by,
    tilt: float = TrainConfig.prune_tilt,
    widths: Sequence[int] | None = None,
    factors: Sequence[Tensor] | None = None,
    seed: int = 0,
) -> DeepMoE:
    """A smaller network, with the weights of the channels that stay.

    Args:
        model: without gates; they would not fit the channels that are left.
        size: of its input images.
        share: of the base network's MACs that is to be left; `None` where widths are given.
        judged_by: labelled training images.
        by: the method, one of `deepmoe.compare.SELECTORS`.
        tilt: of `taylor` and `strength`: how far groups may differ in the share of channels they
            keep, from 0 to 1.
        widths: channels to leave of each group that can lose some, instead of a share.
        factors: of `sss`: what each group's channels were scaled with.
        seed: of what a method draws.

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
    if (share is None) == (widths is None):
        raise UserError("pruning takes a share of the MACs, or widths, and not both")
    if widths is not None:
        check_kept(widths, gating)
    task = PruningTask(
        model,
        gating,
        size,
        1.0 if share is None else share,
        judged_by,
        widths=None if widths is None else tuple(widths),
        tilt=tilt,
        factors=None if factors is None else tuple(factors),
        seed=seed,
    )
    choice = SELECTORS[by](task)
    network, left, _ = gating.narrow(choice.network or model.network, choice.masks)
    small = DeepMoE(
        model.embedding,
        None,
        network.train(model.training),
        Gating(left.graph, model.gating.gated),
        source=dataclasses.replace(model.source, kept=tuple(int(m.sum()) for m in choice.masks)),
        exit_at=model.exit_at,
        unpruned=model.gating.graph,
    )
    small.training = model.training  # its parts keep their own modes
    if choice.refit_norms:
        refit_norms(small, judged_by.epoch(0))
    return small
