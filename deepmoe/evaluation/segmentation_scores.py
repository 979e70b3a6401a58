"""Evaluation of segmentation: intersection over union on whole images, and cost."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.costs import dense_macs
from deepmoe.data.segmentation_files import VOID
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches, batches_for, size_of, summed_costs
from deepmoe.evaluation.scored import Scored
from deepmoe.figures import bars
from deepmoe.model import DeepMoE
from deepmoe.processes import sum_over_processes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SegmentationEvaluation(Scored):
    """What a model does on a set of images; costs are means over images."""

    images: int
    mean_iou: float  # over the classes that occur
    iou: dict[str, float]  # NaN for a class that neither labels nor predictions hold
    pixel_accuracy: float
    loss: float  # mean over the pixels that are not void
    macs: float  # base network as gated, plus embedding and gate heads
    dense_macs: float  # of the ungated base network alone; a mean, as image sizes may differ
    active: float  # share of the gated channels that run
    evaluated_on: str | None = field(default=None, compare=False)  # the images' name

    embedding_accuracy: ClassVar[None] = None  # images have no class here
    measure: ClassVar[str] = "mean IoU"

    @property
    def accuracy(self) -> float:  # type: ignore[override]
        """The figure that a training run is judged by: mean IoU."""
        return self.mean_iou

    def _rows(self) -> list[tuple[str, str]]:
        known = {name: value for name, value in self.iou.items() if not math.isnan(value)}
        by_class = sorted(known.items(), key=lambda item: -item[1])
        return [*super()._rows(), *((f"IoU of {name}", f"{v:.2%}") for name, v in by_class)]

    def plot(self) -> "Figure":
        """Intersection over union of each class that occurs."""
        known = {name: 100 * v for name, v in self.iou.items() if not math.isnan(v)}
        return bars(known, "intersection over union, %", f"mean IoU {self.mean_iou:.2%}")

    def as_dict(self) -> dict[str, Any]:
        """Everything, the share included, as plain values; NaN, which JSON lacks, as `None`."""
        iou = {name: None if math.isnan(value) else value for name, value in self.iou.items()}
        return self._named({**asdict(self), "iou": iou, "macs_share": self.macs_share})


@torch.inference_mode()
def evaluate_segmentation(
    model: DeepMoE, batches: Batches, class_names: Sequence[str]
) -> SegmentationEvaluation:
    """Runs a model over (images_BCHW, labels_BHW) batches; labels of 255 do not count.

    Args:
        model: the model; it is put into evaluation mode and back.
        batches: whole images, normalised as in training; batches may differ in image size.
        class_names: a name for each class of the model.

    Raises:
        UserError: where there are no images or no labels, or the model is not finite.
    """
    model.check_finite()
    classes = len(class_names)
    if classes != model.classes:
        raise UserError(f"the model has {model.classes} classes, not {classes}")
    device = next(model.parameters()).device
    counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    sums = torch.zeros(5, dtype=torch.float64, device=device)  # loss, MACs, active, dense, images
    for x_BCHW, labels_BHW in batches_for(model, batches, doing="evaluating"):
        size, images, output = size_of(x_BCHW), len(x_BCHW), model(x_BCHW)
        counts += confusion(output.logits.argmax(dim=1), labels_BHW, classes)
        dense = torch.tensor(dense_macs(model, size) * images)
        loss = pixel_loss(output.logits, labels_BHW)
        figures = (loss, *summed_costs(model, size, output), dense, torch.tensor(images))
        sums += torch.stack([figure.to(sums) for figure in figures])
    counts = sum_over_processes(counts)
    summed_loss, macs, active, dense_total, total = sum_over_processes(sums).tolist()
    pixels = int(counts.sum())
    if not pixels:
        raise UserError("no pixel of the images to evaluate on has a label")
    if not math.isfinite(summed_loss):
        raise UserError("the model's outputs are not finite")
    iou = iou_from_confusion(counts)
    return SegmentationEvaluation(
        images=int(total),
        mean_iou=iou.nanmean().item(),
        iou=dict(zip(class_names, iou.tolist(), strict=True)),
        pixel_accuracy=int(counts.trace()) / pixels,
        loss=summed_loss / pixels,
        macs=macs / total,
        dense_macs=dense_total / total,
        active=active / total,
    )


def pixel_loss(logits_BCHW: Tensor, labels_BHW: Tensor) -> Tensor:
    """Cross-entropy summed over the pixels that are not void."""
    return F.cross_entropy(logits_BCHW.double(), labels_BHW, ignore_index=VOID, reduction="sum")


def confusion(predictions: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How often each label (rows) got each prediction (columns), void left out."""
    counted = labels != VOID
    pairs = labels[counted] * classes + predictions[counted]
    return torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def iou_from_confusion(matrix: Tensor) -> Tensor:
    """Intersection over union of each class from counts (label, prediction).

    NaN for classes that occur in neither.
    """
    counts = matrix.double()
    both = counts.diagonal()
    return both / (counts.sum(dim=0) + counts.sum(dim=1) - both)
