"""Evaluation: accuracy and cost of a model, and a record of its gates."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from deepmoe.costs import active_share, count_costs, count_macs
from deepmoe.model import DeepMoE, evaluation_mode

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EvalResult:
    """What a model does on a set of images; costs are means over images."""

    images: int
    accuracy: float
    loss: float
    macs: float  # base network as gated, plus embedding and gate heads
    dense_macs: int  # of the ungated base network alone
    active: float  # share of the gated channels that run
    embedding_accuracy: float | None  # None for a dense network

    measure: ClassVar[str] = "accuracy"

    @property
    def macs_share(self) -> float:
        """Mean MACs over those of the dense base network."""
        return self.macs / self.dense_macs

    def as_dict(self) -> dict[str, Any]:
        """Everything, the share included, as plain values."""
        return {**asdict(self), "macs_share": self.macs_share}


@torch.inference_mode()
def evaluate(model: DeepMoE, batches: Batches) -> EvalResult:
    """Runs a model over (images, labels) batches.

    Args:
        model: the model; it is put into evaluation mode and back.
        batches: such as a `BatchLoader`; images must be normalised as in training.
    """
    device = next(model.parameters()).device
    classes = model.backbone.classes
    accuracy = MulticlassAccuracy(classes, average="micro").to(device)
    embedding_accuracy = MulticlassAccuracy(classes, average="micro").to(device)
    # Sums of MACs don't fit into single precision; a NaN must not be hidden.
    loss, macs, active = (
        MeanMetric("disable").to(device).set_dtype(torch.float64) for _ in range(3)
    )
    images, size = SumMetric().to(device).set_dtype(torch.float64), (0, 0)
    with evaluation_mode(model):
        for x_BCHW, labels in batches:
            x_BCHW, labels = model.placed(x_BCHW), labels.to(device)
            size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
            output = model(x_BCHW)
            accuracy.update(output.logits, labels)
            loss.update(F.cross_entropy(output.logits.double(), labels, reduction="none"))
            images.update(len(labels))
            if output.gates is not None:
                embedding_accuracy.update(output.embedding_logits, labels)
                macs.update(count_macs(model, size, output.gates).double())
                active.update(active_share(output.gates).double())
    if not images.update_called:
        raise ValueError("there are no images to evaluate on")
    return EvalResult(
        images=int(images.compute()),
        accuracy=accuracy.compute().item(),
        loss=loss.compute().item(),
        macs=macs.compute().item() if model.gated else float(count_macs(model, size)),
        dense_macs=count_costs(model, size).macs,
        active=active.compute().item() if model.gated else 1.0,
        embedding_accuracy=embedding_accuracy.compute().item() if model.gated else None,
    )


@dataclass(frozen=True)
class GateRecord:
    """The gates of a set of images, for analysis without a model."""

    labels: np.ndarray  # (images,)
    predictions: np.ndarray  # (images,)
    macs: np.ndarray  # (images,)
    gates: tuple[np.ndarray, ...]  # a layer each: (images, channels)
    layer_names: tuple[str, ...]
    class_names: tuple[str, ...]
    dense_macs: int  # of the ungated base network alone


@torch.inference_mode()
def collect_gates(model: DeepMoE, batches: Batches, class_names: tuple[str, ...]) -> GateRecord:
    """Records every image's gates, prediction and cost."""
    if not model.gated:
        raise ValueError("a dense network has no gates to record")
    labels, predictions, macs, gates = [], [], [], []
    size = (0, 0)
    with evaluation_mode(model):
        for x_BCHW, y in batches:
            size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
            output = model(model.placed(x_BCHW))
            labels.append(y.cpu().numpy())
            predictions.append(output.logits.argmax(dim=1).cpu().numpy())
            macs.append(count_macs(model, size, output.gates).cpu().numpy())
            gates.append([g.cpu().numpy() for g in output.gates])
    layers = [layer for layer in model.backbone.layers(*size) if layer.out_gate is not None]
    return GateRecord(
        labels=np.concatenate(labels),
        predictions=np.concatenate(predictions),
        macs=np.concatenate(macs),
        gates=tuple(np.concatenate(parts) for parts in zip(*gates, strict=True)),
        layer_names=tuple(layer.path for layer in layers),
        class_names=class_names,
        dense_macs=count_costs(model, size).macs,
    )


@torch.no_grad()
def gates_of_images(model: DeepMoE, batches: Batches, images: int) -> Tensor:
    """The gates of so many images at most, all layers side by side; no codebook is looked at."""
    assert model.embedding is not None
    found, count = [model.placed(torch.zeros(0, sum(model.backbone.gate_widths)))], 0
    with evaluation_mode(model):
        for x_BCHW, _ in batches:
            e_BD, _ = model.embedding(model.placed(x_BCHW))
            found.append(model.gates_side_by_side(e_BD))
            count += len(x_BCHW)
            if count >= images:
                break
    return torch.cat(found)[:images]
