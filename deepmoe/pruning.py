"""Static pruning: the least important channels go for good, as many as a cost asks for.

Which channels go is the same for all images, and a method of `deepmoe.compare` decides it.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from deepmoe.compare import SELECTORS, Epochs, PruningTask
from deepmoe.config import PruneBy, TrainConfig
from deepmoe.costs import Size
from deepmoe.data import Batch
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import checked_batches
from deepmoe.evaluation.cut import refit_norms
from deepmoe.graph import Gating, check_kept, describe, prunable
from deepmoe.hard_moe import refuse_experts
from deepmoe.model import DeepMoE


def prune_module(
    module: nn.Module,
    images: Tensor,
    share: float | None,
    batches: Iterable[Batch],
    *,
    by: PruneBy = TrainConfig.prune_by,
    tilt: float = TrainConfig.prune_tilt,
    widths: Sequence[int] | None = None,
    seed: int = 0,
) -> nn.Module:
    """A smaller copy of any convolutional network: fewer channels, the same class and forward.

    Args:
        module: trained; it is left as it is.
        images: a few such as it takes, normalised.
        share: of its MACs that is to be left; `None` where widths are given.
        batches: of normalised training images and labels, such as a torch `DataLoader`.
        by: as of `prune`, as are the others.
        tilt: see there.
        widths: see there.
        seed: see there.

    Raises:
        UserError: where the network can't be captured, or pruned so far.
    """
    _check_mode()
    graph = describe(module, images)
    model = DeepMoE(None, None, module, prunable(graph))
    model.training = module.training
    size = (images.shape[-2], images.shape[-1])
    return prune(model, size, share, batches, by=by, tilt=tilt, widths=widths, seed=seed).network


@torch.no_grad()
def prune(
    model: DeepMoE,
    size: Size,
    share: float | None,
    judged_by: Epochs | Iterable[Batch],
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
        judged_by: labelled training images: a loader, or batches of images and labels.
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
    _check_mode()
    if not isinstance(model, DeepMoE):
        raise UserError("prune takes a deepmoe model: use prune_module for any other network")
    if not isinstance(by, str) or by not in SELECTORS:
        raise UserError(f"channels are pruned by one of {', '.join(SELECTORS)}, not by {by!r}")
    classes = model.classes
    loader: Epochs = judged_by if isinstance(judged_by, Epochs) else Batches(judged_by, classes)
    refuse_experts(model, "prune the network that they start from")
    if model.gated:
        raise UserError("a gated model can't be pruned: prune the network, then gate what is left")
    if model.unpruned is not None:
        raise UserError("this network is pruned already: prune the one that it was made of")
    gating = prunable(model.gating.graph)
    _check_arguments(gating, share, tilt, widths, factors, seed)
    model.check_finite()
    task = PruningTask(
        model,
        gating,
        size,
        1.0 if share is None else share,
        loader,
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
        exit_vote=model.exit_vote,
        unpruned=model.gating.graph,
    )
    small.training = model.training  # its parts keep their own modes
    if choice.refit_norms:
        refit_norms(small, loader.epoch(0))
    return small


def _check_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise UserError("pruning looks at gradients: call it outside of torch.inference_mode()")


def _check_arguments(
    gating: Gating,
    share: float | None,
    tilt: float,
    widths: Sequence[int] | None,
    factors: Sequence[Tensor] | None,
    seed: int,
) -> None:
    if (share is None) == (widths is None):
        raise UserError("pruning takes a share of the MACs or widths, not both")
    for name, number in (("share", 1.0 if share is None else share), ("tilt", tilt)):
        if not isinstance(number, Real) or not 0 <= number <= 1:
            raise UserError(f"the {name} is a number from 0 to 1, not {number!r}")
    if not isinstance(seed, int) or seed < 0:
        raise UserError(f"a seed is a whole number from 0 on, not {seed!r}")
    if widths is not None:
        check_kept(widths if isinstance(widths, Sequence) else (), gating)
    if factors is not None and [len(part) for part in factors] != list(gating.widths):
        raise UserError(f"factors are of groups of {list(gating.widths)} channels")
    if factors is not None and not all(bool(part.isfinite().all()) for part in factors):
        raise UserError("factors are finite numbers")


class Batches:
    """Batches of a user's own, such as a torch `DataLoader`, as methods ask for them."""

    def __init__(self, batches: Iterable[Batch], classes: int) -> None:
        self.batches = batches
        self.classes = classes

    def epoch(self, number: int) -> Iterator[Batch]:
        """All batches, as they come."""
        if not isinstance(self.batches, Iterable) or isinstance(self.batches, Iterator):
            raise UserError(
                "this method goes through training images more than once: give a DataLoader, or a "
                "list of batches"
            )
        for x_BCHW, labels in checked_batches(self.batches, self.classes):
            if not bool(x_BCHW.isfinite().all()):
                raise UserError("some pixels of the training images are not finite")
            yield x_BCHW, labels
