"""Evaluation of classifiers: accuracy and cost."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from deepmoe.costs import dense_macs
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches, batches_for, size_of, summed_costs
from deepmoe.evaluation.scored import Scored
from deepmoe.model import DeepMoE
from deepmoe.processes import sum_over_processes


@dataclass(frozen=True)
class Evaluation(Scored):
    """What a classifier does on a set of images; costs are means over images."""

    images: int
    accuracy: float
    loss: float
    macs: float  # base network as gated, plus embedding and gate heads
    dense_macs: int  # of the base network alone, with all channels
    active: float  # share of the gated channels that run
    embedding_accuracy: float | None  # None for a model without one that answers
    exited: float | None = None  # share of the images that the embedding has answered
    evaluated_on: str | None = field(default=None, compare=False)  # the images' name

    measure: ClassVar[str] = "accuracy"

    def _rows(self) -> list[tuple[str, str]]:
        exits = [] if self.exited is None else [("exit rate", f"{self.exited:.1%}")]
        return [*super()._rows(), *exits]

    def as_dict(self) -> dict[str, Any]:
        """Everything, the share included, as plain values."""
        return self._named({**asdict(self), "macs_share": self.macs_share})


@torch.inference_mode()
def evaluate(model: DeepMoE, batches: Batches) -> Evaluation:
    """Runs a model over (images, labels) batches; several processes add up theirs.

    Args:
        model: the model; it is put into evaluation mode and back.
        batches: such as a `BatchLoader`; images must be normalised as in training.

    Raises:
        UserError: where there are no images, or the model's weights or outputs are not finite.
    """
    model.check_finite()
    device, size, answers = next(model.parameters()).device, (0, 0), False
    # In double precision: sums of MACs don't fit into single precision.
    sums = torch.zeros(8, dtype=torch.float64, device=device)
    for x_BCHW, labels in batches_for(model, batches, doing="evaluating"):
        size, output = size_of(x_BCHW), model(x_BCHW)
        logits, guess = output.logits.double(), output.embedding_logits
        none, answers = torch.zeros_like(sums[0]), guess is not None
        figures = (
            torch.ones_like(labels).sum(),
            (logits.argmax(dim=1) == labels).sum(),
            F.cross_entropy(logits, labels, reduction="sum"),
            *summed_costs(model, size, output),
            none if guess is None else (guess.argmax(dim=1) == labels).sum(),
            none if output.exited is None else output.exited.sum(),
            logits.isfinite().all(dim=1).sum(),
        )
        sums += torch.stack([figure.double() for figure in figures])
    images, *totals, finite = sum_over_processes(sums).tolist()
    if finite < images:
        raise UserError(f"the model's outputs for {images - finite:.0f} images are not finite")
    accuracy, loss, macs, active, embedding_accuracy, exited = (t / images for t in totals)
    return Evaluation(
        images=int(images),
        accuracy=accuracy,
        loss=loss,
        macs=macs,
        dense_macs=dense_macs(model, size),
        active=active,
        embedding_accuracy=embedding_accuracy if answers else None,
        exited=exited if model.exit_at is not None else None,
    )
