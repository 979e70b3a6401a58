"""A record of the gates of many images, for analysis without a model."""

from dataclasses import dataclass

import numpy as np
import torch

from deepmoe.costs import count_macs, dense_macs
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches, batches_for, size_of
from deepmoe.hard_moe import refuse_experts
from deepmoe.model import DeepMoE


@dataclass(frozen=True)
class GateRecord:
    """The gates of a set of images."""

    labels: np.ndarray  # (images,)
    predictions: np.ndarray  # (images,)
    macs: np.ndarray  # (images,)
    gates: tuple[np.ndarray, ...]  # a layer each: (images, channels); none without heads
    layer_names: tuple[str, ...]
    class_names: tuple[str, ...]
    dense_macs: int  # of the base network alone, with all channels
    exited: np.ndarray | None = None  # (images,): answered by the embedding; None without exits


@torch.inference_mode()
def collect_gates(model: DeepMoE, batches: Batches, class_names: tuple[str, ...]) -> GateRecord:
    """Records every image's gates, prediction and cost.

    Gates of an image that the embedding has answered are zero: none of its channels ran.
    """
    refuse_experts(model, "it has no gates to record")
    if not model.gated and model.exit_at is None:
        raise UserError("a dense network has no gates to record")
    rows, size = [], (0, 0)
    for x_BCHW, labels in batches_for(model, batches, doing="recording gates"):
        size, output = size_of(x_BCHW), model(x_BCHW)
        macs = count_macs(model, size, output.gates, output.exited)
        exited = output.exited
        if exited is None:
            exited = torch.zeros(len(x_BCHW), dtype=torch.bool, device=x_BCHW.device)
        gates = [g.masked_fill(exited[:, None], 0.0) for g in output.gates or ()]
        row = (labels, output.logits.argmax(dim=1), macs, exited, *gates)
        rows.append([tensor.cpu().numpy() for tensor in row])
    columns = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
    return GateRecord(
        labels=columns[0],
        predictions=columns[1],
        macs=columns[2],
        gates=tuple(columns[4:]),
        layer_names=model.gating.names if model.gated else (),
        class_names=class_names,
        dense_macs=dense_macs(model, size),
        exited=columns[3] if model.exit_at is not None else None,
    )
