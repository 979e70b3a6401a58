"""What embedding and base network say of labelled images: all that exits are found from.

One pass over images that the model has not learnt from tells how sure the embedding is, whether its
answer is right, whether the base network's is, and whether that of both together.
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
from deepmoe.evaluation.batches import Batches, batches_for, check_model, size_of
from deepmoe.hard_moe import refuse_experts
from deepmoe.model import DeepMoE, confidence, joint_answer, refuse_sparse

VOTES = tuple(step / 20 for step in range(11))  # of an embedding, that are tried
TEMPERATURES = tuple(2 ** (step / 4) for step in range(-4, 9))  # that logits are divided by


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
        off = threshold > 1
        figures = self.at(math.inf if off else threshold)  # a little above 1 may be rounded to it
        exited = self.confidence >= figures.threshold
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
    check_model(model)
    refuse_experts(model, "it can't have exits, since its features answer nothing themselves")
    model.check_ahead()
    if model.embedding is None:
        raise UserError(
            "the model has no embedding that could answer: train one with model.exits=true"
        )
    refuse_sparse(model, "set_exits")
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
        if len(votes) > 1:  # one is not chosen
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


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


def _standard_error(values: Tensor) -> float:
    return values.std(correction=0).item() / math.sqrt(len(values))
