"""When the embedding answers itself: thresholds for a cost, for a loss of accuracy, and certified.

All of it is found from one pass over labelled images that the model has not learnt from: for each
how sure the embedding is, whether its answer is right, and whether the whole network's is.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.costs import active_share, count_costs, count_macs, dense_macs
from deepmoe.errors import UserError
from deepmoe.evaluation.accuracy import Evaluation
from deepmoe.evaluation.batches import Batches, batches_for, size_of
from deepmoe.extras import require
from deepmoe.hard_moe import refuse_experts
from deepmoe.model import DeepMoE, confidence, joint_answer

CERTIFIED_STEPS = 1000  # thresholds that are tested one after the other, from 1 down to 0
VOTES = tuple(step / 20 for step in range(11))  # of an embedding, that are tried
TEMPERATURES = tuple(2 ** (step / 4) for step in range(-4, 9))  # that logits are divided by
NEVER = 2.0  # a confidence that none reaches
BY_CHANCE = 0.05  # an embedding that is not better than guessing at this level has learnt nothing


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What embedding and whole network say of a set of images; each tensor has one value an image.

    Attributes:
        confidence: how sure the embedding is, in the precision in which the model compares it.
        early_right: whether the embedding's answer is right.
        right: whether the base network's own is.
        joint_right: whether that of both together is, which images get that go on.
        early_loss: cross-entropy of the embedding's answer.
        loss: that of the base network's.
        joint_loss: that of both together.
        vote: share of the embedding in what both say together.
        active: share of the gated channels that run, if the image goes on.
        macs: of the whole network, embedding included.
        macs_without: of a model that never asks the embedding for an answer. Where it makes no
            gates either, it need not run at all.
        embedding_macs: what an answer of the embedding costs.
        dense_macs: of the base network with all channels.
        classes: how many the answers choose from.
    """

    confidence: Tensor
    early_right: Tensor
    right: Tensor
    joint_right: Tensor
    early_loss: Tensor
    loss: Tensor
    joint_loss: Tensor
    vote: float
    active: Tensor
    macs: Tensor
    macs_without: Tensor
    embedding_macs: int
    dense_macs: int
    classes: int

    def __len__(self) -> int:
        return len(self.right)

    def at(self, threshold: float) -> "ExitFigures":
        """What the model does when the embedding answers from this confidence on."""
        # As the model keeps it, in its precision: what is measured is what will be used.
        threshold = float(torch.tensor(threshold, dtype=self.confidence.dtype))
        exited = self.confidence >= threshold
        right = torch.where(exited, self.early_right, self.joint_right)
        macs = torch.where(exited, self.embedding_macs, self.macs)
        return ExitFigures(
            threshold=threshold,
            vote=self.vote,
            images=len(self),
            exited=_mean(exited),
            accuracy=_mean(right),
            accuracy_without=_mean(self.right),
            loss_error=_standard_error(self.right.double() - right.double()),
            spoilt=int((exited & self.right & ~self.early_right).sum()),
            macs=_mean(macs),
            macs_without=_mean(self.macs_without),
            dense_macs=self.dense_macs,
        )

    def evaluation(self, threshold: float) -> Evaluation:
        """The same in the words of `evaluate`. Above 1, there are no exits, and no vote."""
        figures = self.at(threshold)
        exited = self.confidence >= figures.threshold
        off = threshold > 1
        losses = self.loss if off else torch.where(exited, self.early_loss, self.joint_loss)
        return Evaluation(
            images=len(self),
            accuracy=figures.accuracy_without if off else figures.accuracy,
            loss=_mean(losses),
            macs=figures.macs_without if off else figures.macs,
            dense_macs=self.dense_macs,
            active=_mean(torch.where(exited, 0.0, self.active)),
            embedding_accuracy=_mean(self.early_right),
            exited=figures.exited,
        )


@dataclass(frozen=True)
class ExitFigures:
    """A threshold, and what it does on a set of images; costs are means over images."""

    threshold: float
    vote: float  # share of the embedding in the answers of images that go on
    images: int
    exited: float  # exit rate: share of the images that the embedding answers
    accuracy: float
    accuracy_without: float  # of the whole network on all images
    loss_error: float  # standard error of the loss: how far other images may be from it
    spoilt: int  # images that the whole network gets right, and the embedding answers wrongly
    macs: float
    macs_without: float
    dense_macs: int

    @property
    def loss(self) -> float:
        """Of accuracy, by the exits; negative for a gain."""
        return self.accuracy_without - self.accuracy

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, shares of the dense MACs included."""
        shares = {
            "macs_share": self.macs / self.dense_macs,
            "macs_share_without": self.macs_without / self.dense_macs,
        }
        return {**asdict(self), **shares, "loss": self.loss}


@torch.inference_mode()
def collect_answers(
    model: DeepMoE, batches: Batches, votes: Sequence[float] | None = None
) -> Answers:
    """One pass over images: what the embedding says, the base network, and both together.

    Args:
        model: with an embedding.
        batches: normalised images and labels.
        votes: of the embedding to choose from: the one is taken whose joint answers have the
            smallest cross-entropy, once they are calibrated: an average is less sure of itself, and
            must not win by that alone. Those that make answers worse are left out. The model's own
            if not given.

    Raises:
        UserError: for a model without an embedding, one that does not classify images, or outputs
            that are not finite.
    """
    refuse_experts(model, "it can't have exits, since its features answer nothing themselves")
    model.check_ahead()
    if model.embedding is None:
        raise UserError(
            "the model has no embedding that could answer: train one with model.exits=true"
        )
    if next(model.network.parameters(), None) is None:
        raise UserError("exits are fitted to no sparse model: give the model that it was made of")
    model.check_finite()
    found, size = [], (0, 0)
    own = 0.0 if model.exit_vote is None else float(model.exit_vote)
    votes = (own,) if votes is None else votes
    losses_VT = torch.zeros(len(votes), len(TEMPERATURES), dtype=torch.float64)
    for x_BCHW, labels in batches_for(model, batches, doing="finding exits", classes=model.classes):
        if labels.dim() != 1:
            raise UserError("segmentation has no exits: an embedding answers for a whole image")
        size = size_of(x_BCHW)
        gates, early = model.route(x_BCHW)
        logits = model.gating(model.network, x_BCHW, gates)
        assert early is not None
        if not bool(early.isfinite().all() & logits.isfinite().all()):
            raise UserError("the model's outputs are not finite")
        joint_VBC = torch.stack([joint_answer(logits, early, logits.new_tensor(v)) for v in votes])
        joint_loss_VB = [F.cross_entropy(z, labels, reduction="none") for z in joint_VBC.double()]
        losses_VT += torch.stack([losses_by_temperature(z, labels) for z in joint_VBC]).cpu()
        answers = {
            "confidence": confidence(early),
            "early_right": early.argmax(dim=1) == labels,
            "right": logits.argmax(dim=1) == labels,
            "joint_right": (joint_VBC.argmax(dim=2) == labels).T,
            "early_loss": F.cross_entropy(early.double(), labels, reduction="none"),
            "loss": F.cross_entropy(logits.double(), labels, reduction="none"),
            "joint_loss": torch.stack(joint_loss_VB, dim=1),
            "active": torch.ones_like(labels) if gates is None else active_share(gates),
            "macs": torch.zeros_like(labels) + count_macs(model, size, gates),
        }
        found.append({name: values.cpu() for name, values in answers.items()})
    columns = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    embedding_macs = count_costs(model, size).embedding_macs
    best = best_vote(losses_VT, columns["joint_right"].sum(dim=0), columns["right"].sum())
    columns |= {name: columns[name][:, best] for name in ("joint_right", "joint_loss")}
    return Answers(
        **columns,
        vote=votes[best],
        macs_without=columns["macs"] - (0 if model.gated else embedding_macs),
        embedding_macs=embedding_macs,
        dense_macs=dense_macs(model, size),
        classes=model.classes,
    )


def best_vote(losses_VT: Tensor, hits_V: Tensor, hits_alone: Tensor) -> int:
    """Which of several votes to take.

    Args:
        losses_VT: of each vote's answers, as `losses_by_temperature` gives them.
        hits_V: how many images each of them gets right.
        hits_alone: how many the base network gets right.
    """
    return int(losses_VT.amin(dim=1).masked_fill(hits_V < hits_alone, torch.inf).argmin())


def losses_by_temperature(logits_BC: Tensor, labels: Tensor) -> Tensor:
    """The sum of the images' cross-entropies, of logits divided by each of `TEMPERATURES`."""
    z_BC = logits_BC.double()
    losses = [F.cross_entropy(z_BC / t, labels, reduction="sum") for t in TEMPERATURES]
    return torch.stack(losses)


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
        threshold, vote = (
            torch.tensor(value, dtype=torch.float64).to(like.device, like.dtype)
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
    return answers.at(float(answers.confidence[order[first]]))


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
    return answers.at(float(answers.confidence[order[int(good.nonzero()[-1])]]))


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
    if not 0 < points < 100:
        raise UserError(f"a certified loss lies between 0 and 100 points, not at {points:g}")
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


def _check_embedding(answers: Answers) -> None:
    """Refuses an embedding that is no better than chance."""
    require("train", "scipy")
    from scipy.stats import binomtest

    hits, guessed = int(answers.early_right.sum()), 1 / answers.classes
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


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


def _standard_error(values: Tensor) -> float:
    return values.std(correction=0).item() / math.sqrt(len(values))
