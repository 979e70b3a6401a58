"""A record of what each of many images ran and cost, for analysis without a model."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmoe.costs import count_macs, dense_macs
from deepmoe.data.segmentation_files import VOID
from deepmoe.evaluation.batches import Batches, batches_for, size_of
from deepmoe.hard_moe import HardMoE
from deepmoe.model import DeepMoE, DeepMoEOutput


@dataclass(frozen=True)
class GateRecord:
    """What a set of images ran: gates, costs, answers.

    Attributes:
        labels: (images,); `None` where each pixel has a label, and not the image.
        predictions: (images,), or `None` likewise.
        macs: (images,).
        gates: for each gated layer, (images, channels); none without gates.
        layer_names: of the gated layers.
        class_names: of the data.
        dense_macs: of the base network alone, with all channels; a mean where sizes differ.
        exited: (images,): which images the embedding has answered; `None` without exits.
        experts: (images,): the number of each image's expert; `None` without experts.
        scores: (images,): 1 for a right answer and 0 for a wrong one, or the share of the pixels
            that are right (NaN where none has a label).
    """

    labels: np.ndarray | None
    predictions: np.ndarray | None
    macs: np.ndarray
    gates: tuple[np.ndarray, ...]
    layer_names: tuple[str, ...]
    class_names: tuple[str, ...]
    dense_macs: float
    exited: np.ndarray | None = None
    experts: np.ndarray | None = None
    scores: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.macs)


@torch.inference_mode()
def collect_gates(model: DeepMoE, batches: Batches, class_names: tuple[str, ...]) -> GateRecord:
    """Records every image's gates, prediction and cost.

    Gates of an image that the embedding has answered are zero: none of its channels ran. A network
    without gates has a record without gates.
    """
    rows: dict[str, list[np.ndarray]] = {}
    for x_BCHW, labels in batches_for(model, batches, doing="recording gates"):
        for name, values in _of_batch(model, x_BCHW, labels).items():
            rows.setdefault(name, []).append(values.cpu().numpy())
    columns = {name: np.concatenate(parts) for name, parts in rows.items()}
    names = model.gating.names if model.gated else ()
    return GateRecord(
        labels=columns.get("labels"),
        predictions=columns.get("predictions"),
        macs=columns["macs"],
        gates=tuple(columns[f"gates {number}"] for number in range(len(names))),
        layer_names=names,
        class_names=class_names,
        dense_macs=float(columns["dense"].mean()),
        exited=columns.get("exited"),
        experts=columns.get("experts"),
        scores=columns["scores"],
    )


def _of_batch(model: DeepMoE, x_BCHW: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What is recorded of a batch, by name: one row an image."""
    size, output = size_of(x_BCHW), model(x_BCHW)
    each = torch.ones(len(x_BCHW), dtype=torch.int64, device=x_BCHW.device)
    found = {
        "macs": each * count_macs(model, size, output.gates, output.exited),
        "dense": each * dense_macs(model, size),
        "scores": _scores(output, labels),
    }
    if labels.dim() == 1:
        found |= {"labels": labels, "predictions": output.logits.argmax(dim=1)}
    if isinstance(model, HardMoE):
        found["experts"] = model.cluster(x_BCHW)
    if output.exited is not None:
        found["exited"] = output.exited
    for number, g_BC in enumerate(output.gates or ()):
        ran = g_BC if output.exited is None else g_BC.masked_fill(output.exited[:, None], 0.0)
        found[f"gates {number}"] = ran.float()
    return found


def _scores(output: DeepMoEOutput, labels: Tensor) -> Tensor:
    right = (output.logits.argmax(dim=1) == labels).double()
    if labels.dim() == 1:
        return right
    counted = labels != VOID
    return (right * counted).sum(dim=(1, 2)) / counted.sum(dim=(1, 2))
