"""Evaluation of segmentation: intersection over union on whole images, and cost."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from deepmoe.costs import active_share, count_costs, count_macs
from deepmoe.data.segmentation_files import VOID
from deepmoe.model import DeepMoE, evaluation_mode
from deepmoe.training.evaluate import Batches


@dataclass(frozen=True)
class SegmentationResult:
    """What a model does on a set of images; costs are means over images."""

    images: int
    mean_iou: float  # over the classes that occur
    iou: dict[str, float]  # NaN for a class that neither labels nor predictions hold
    pixel_accuracy: float
    loss: float  # mean over the pixels that are not void
    macs: float  # base network as gated, plus embedding and gate heads
    dense_macs: float  # of the ungated base network alone; a mean, as image sizes may differ
    active: float  # share of the gated channels that run

    embedding_accuracy: ClassVar[None] = None  # images have no class here
    measure: ClassVar[str] = "mean IoU"

    @property
    def accuracy(self) -> float:
        """The figure that a training run is judged by: mean IoU."""
        return self.mean_iou

    @property
    def macs_share(self) -> float:
        """Mean MACs over those of the dense base network."""
        return self.macs / self.dense_macs

    def as_dict(self) -> dict[str, Any]:
        """Everything, the share included, as plain values; NaN, which JSON lacks, as `None`."""
        iou = {name: None if math.isnan(value) else value for name, value in self.iou.items()}
        return {**asdict(self), "iou": iou, "macs_share": self.macs_share}


@torch.inference_mode()
def evaluate_segmentation(
    model: DeepMoE,
    batches: Batches,
    class_names: Sequence[str],
) -> SegmentationResult:
    """Runs a model over (images_BCHW, labels_BHW) batches; labels of 255 do not count.

    Args:
        model: the model; it is put into evaluation mode and back.
        batches: whole images, normalised as in training; batches may differ in image size.
        class_names: a name for each class of the model.
    """
    classes = len(class_names)
    if classes != model.backbone.classes:
        raise ValueError(
            f"the model has {model.backbone.classes} classes, but {classes} have names"
        )
    device = next(model.parameters()).device
    # Without checks, which would sort all pixels. Metrics add up over processes by themselves.
    confusion = MulticlassConfusionMatrix(classes, ignore_index=VOID, validate_args=False)
    confusion = confusion.to(device)
    # Sums of MACs and of pixels don't fit into single precision; `to` would go back to it.
    images, loss = (SumMetric().to(device).set_dtype(torch.float64) for _ in range(2))
    macs, dense_macs, active = (MeanMetric().to(device).set_dtype(torch.float64) for _ in range(3))
    with evaluation_mode(model):
        for x_BCHW, labels_BHW in batches:
            x_BCHW, labels_BHW = model.placed(x_BCHW), labels_BHW.to(device)
            size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
            output = model(x_BCHW)
            confusion.update(output.logits.argmax(dim=1), labels_BHW)
            loss.update(pixel_loss(output.logits, labels_BHW))
            images.update(len(x_BCHW))
            dense_macs.update(float(count_costs(model, size).macs), len(x_BCHW))
            if output.gates is None:
                macs.update(float(count_macs(model, size)), len(x_BCHW))
            else:
                macs.update(count_macs(model, size, output.gates).double())
                active.update(active_share(output.gates).double())
    if not images.update_called:
        raise ValueError("there are no images to evaluate on")
    counts = confusion.compute()
    pixels = counts.sum().item()
    iou = iou_from_confusion(counts)
    return SegmentationResult(
        images=int(images.compute()),
        mean_iou=iou.nanmean().item(),
        iou=dict(zip(class_names, iou.tolist(), strict=True)),
        pixel_accuracy=counts.trace().item() / pixels if pixels else math.nan,
        loss=loss.compute().item() / pixels if pixels else math.nan,
        macs=macs.compute().item(),
        dense_macs=dense_macs.compute().item(),
        active=active.compute().item() if model.gated else 1.0,
    )


def pixel_loss(logits_BCHW: Tensor, labels_BHW: Tensor) -> Tensor:
    """Cross-entropy summed over the pixels that are not void."""
    return F.cross_entropy(logits_BCHW.double(), labels_BHW, ignore_index=VOID, reduction="sum")


def iou_from_confusion(matrix: Tensor) -> Tensor:
    """Intersection over union of each class from counts (label, prediction).

    NaN for classes that occur in neither.
    """
    counts = matrix.double()
    both = counts.diagonal()
    return both / (counts.sum(dim=0) + counts.sum(dim=1) - both)
