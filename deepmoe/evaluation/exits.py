"""When the embedding answers itself: thresholds for a cost or a loss of accuracy, or certified."""

import math

import torch
from torch import Tensor

from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches
from deepmoe.evaluation.exit_answers import VOTES, Answers, ExitFigures, collect_answers
from deepmoe.extras import require
from deepmoe.model import DeepMoE

LEAST_CERTIFIED = 1e-6  # points: a smaller loss would need more images than there are
CERTIFIED_STEPS = 1000  # thresholds that are tested one after the other, from 1 down to 0
NEVER = 2.0  # a confidence that none reaches
MARGIN = 1e-4  # far more than rounding changes a confidence, and hardly any images are in it
BY_CHANCE = 0.05  # an embedding that is not better than guessing at this level has learnt nothing


def set_exits(
    model: DeepMoE,
    batches: Batches,
    *,
    loss: float | None = None,
    macs: float | None = None,
    guarantee: float | None = None,
) -> ExitFigures:
    """Lets a model's embedding answer the images that it is sure of.

    Args:
        model: with an embedding that has learnt to classify; `exit_at` and `exit_vote` are set.
        batches: normalised images and labels that the model has not learnt from.
        loss: points of accuracy that may be lost on them, such as 0.5.
        macs: or the share of the dense MACs to come down to.
        guarantee: with `loss`: the probability with which no more is lost on other images. What is
            certified is the base network's own answer, so that the embedding has no vote then.

    Returns:
        What that does on the given images.

    Raises:
        UserError: for a model that can't have exits, or a threshold that can't be met.
    """
    check_asked(loss, macs, guarantee)
    answers = collect_answers(model, batches, VOTES if guarantee is None else (0.0,))
    if macs is not None:
        figures = exit_for_macs(answers, macs)
    else:
        assert loss is not None
        if guarantee is None:
            figures = exit_for_loss(answers, loss)
        else:
            figures = exit_certified(answers, loss, guarantee)
    if figures.macs >= figures.macs_without:
        raise UserError(
            f"exits do not pay here: at an exit rate of {figures.exited:.1%} the model costs "
            f"{figures.macs / figures.dense_macs:.3f} of the dense MACs, and without exits "
            f"{figures.macs_without / figures.dense_macs:.3f}; allow more loss, or train a "
            "smaller embedding"
        )
    with torch.inference_mode(False):  # buffers of that mode would spoil later training
        like = next(model.parameters())
        # In the precision in which confidence is compared, which the weights may not have.
        dtype = torch.promote_types(like.dtype, torch.float32)
        threshold, vote = (
            torch.tensor(value, dtype=dtype, device=like.device)
            for value in (figures.threshold, figures.vote)
        )
        model.exit_at, model.exit_vote = threshold, vote if figures.vote else None
    return figures


def check_asked(loss: float | None, macs: float | None, guarantee: float | None) -> None:
    """Refuses a wish for exits that is none, or two."""
    if (loss is None) == (macs is None):
        raise UserError(
            "exits are fitted for a loss of accuracy or for a cost: give a loss, such as 0.5, or "
            "macs, such as 0.2, and not both"
        )
    if guarantee is not None and loss is None:
        raise UserError("a guarantee bounds a loss of accuracy: give a loss with it")


def exit_for_macs(answers: Answers, share: float) -> ExitFigures:
    """The highest threshold at which the model costs this share of the dense MACs, or less.

    Raises:
        UserError: where no threshold does, or none is needed.
    """
    _check_embedding(answers)
    low = answers.embedding_macs / answers.dense_macs
    high = answers.at(NEVER).macs_without / answers.dense_macs
    if not low <= share < high:
        raise UserError(
            f"exits can't bring the cost to {share:g} of the dense MACs: "
            f"this model costs {high:.3f} without them, and {low:.3f} if all images exit"
        )
    # Costs are counted image by image, the surest first: images may tie, and cost differently.
    order = answers.confidence.argsort(descending=True, stable=True)
    saved = (answers.macs - answers.embedding_macs)[order].double().cumsum(0)
    enough = saved >= answers.macs.double().sum() - share * answers.dense_macs * len(answers)
    first = int(enough.nonzero()[0])
    return answers.at(_reached_by(answers, answers.confidence[order[first]]))


def exit_for_loss(answers: Answers, points: float) -> ExitFigures:
    """The lowest threshold that loses no more than these points of accuracy on the images.

    Raises:
        UserError: where every threshold loses more.
    """
    _check_embedding(answers)
    if not 0 <= points <= 100:
        raise UserError(f"a loss of accuracy is from 0 to 100 points, not {points:g}")
    order = answers.confidence.argsort(descending=True, stable=True)
    # Without an exit, what goes on has gained or lost already: by the embedding's vote.
    lost_on_the_way = int(answers.right.sum()) - int(answers.joint_right.sum())
    lost = answers.joint_right[order].long() - answers.early_right[order].long()
    ends = _last_of_equal(answers.confidence[order])
    # Whole images: 0.7 points of 1,000 are 7 of them, and not a little less.
    allowed = math.floor(points * len(answers) / 100 + 1e-9)
    good = ends & (lost_on_the_way + lost.cumsum(0) <= allowed)
    if not bool(good.any()):
        raise UserError(
            f"every threshold loses more than {points:g} points on these {len(answers)} images"
        )
    last = int(good.nonzero()[-1])
    return answers.at(_reached_by(answers, answers.confidence[order[last]]))


def exit_certified(answers: Answers, points: float, guarantee: float) -> ExitFigures:
    """The lowest threshold whose loss is certified to be no more than these points.

    The loss that counts is the share of images that the whole network gets right and the embedding
    answers wrongly, so that the accuracy lost is no more. Thresholds are tested from the safest to
    the boldest, each by an exact binomial bound, and the last one before the first that fails is
    taken: whatever the images' distribution, with this probability over the choice of images the
    threshold keeps its promise (fixed-sequence testing, as in arXiv 2405.20915). That holds if
    neither the thresholds nor the model were chosen with these images.

    Args:
        answers: of images that the model has not learnt from.
        points: of accuracy that may be lost.
        guarantee: probability with which the promise is kept, such as 0.95.

    Raises:
        UserError: where no threshold can be certified.
    """
    require("train", "scipy")
    from scipy.stats import binom  # type: ignore[import-untyped]

    _check_embedding(answers)
    if not LEAST_CERTIFIED <= points < 100:
        raise UserError(
            f"a certified loss lies between 0 and 100 points ({LEAST_CERTIFIED:g} or more), not at "
            f"{points:g}"
        )
    if not 0 < guarantee < 1:
        raise UserError(f"a guarantee is a probability between 0 and 1, not {guarantee:g}")
    images, risk = len(answers), points / 100
    allowed = int(binom.ppf(1 - guarantee, images, risk))
    if binom.cdf(allowed, images, risk) > 1 - guarantee:
        allowed -= 1
    if allowed < 0:
        needed = math.ceil(math.log(1 - guarantee) / math.log(1 - risk))
        raise UserError(
            f"a loss of {points:g} points can't be certified at {guarantee:g} on {images} images: "
            f"even without a mistake, {needed} are needed"
        )
    certified = None
    for step in range(CERTIFIED_STEPS + 1):
        figures = answers.at(1 - step / CERTIFIED_STEPS)
        if figures.spoilt > allowed:
            break
        certified = figures
    if certified is None or not certified.exited:
        raise UserError(
            f"no exit can be certified to lose at most {points:g} points: the embedding gets too "
            "many images wrong even among those it is most confident of"
        )
    return certified


def _reached_by(answers: Answers, level: Tensor) -> float:
    """A threshold that images of this confidence and above it reach, and no others.

    It lies a little below: other batches, the sparse engine and exported files round differently,
    and would let the image go on that is just as sure as it asks for.
    """
    others = answers.confidence[answers.confidence < level]
    below = others.max() if len(others) else torch.zeros_like(level)
    threshold = torch.maximum(level - MARGIN, (level + below) / 2)
    return float(threshold if threshold > below else level)  # there may be no number between


def _check_embedding(answers: Answers) -> None:
    """Refuses an embedding that is no better than chance."""
    require("train", "scipy")
    from scipy.stats import binomtest

    hits, guessed = int(answers.early_right.sum()), 1 / answers.classes
    if guessed ** len(answers) > BY_CHANCE and answers.classes > 1:
        raise UserError(
            f"there are too few images ({len(answers)}) to tell whether the embedding is better "
            f"than guessing among {answers.classes} classes: hold out more"
        )
    test = binomtest(hits, len(answers), guessed, alternative="greater")
    if test.pvalue > BY_CHANCE:
        raise UserError(
            f"the embedding is right for {hits / len(answers):.1%} of the images, no better than "
            f"guessing among {answers.classes} classes: train it with loss.embedding above 0"
        )


def _last_of_equal(sorted_values: Tensor) -> Tensor:
    """Where the last of each run of equal values stands: a threshold takes all of them, or none."""
    last = torch.ones_like(sorted_values, dtype=torch.bool)
    last[:-1] = sorted_values[1:] != sorted_values[:-1]
    return last
