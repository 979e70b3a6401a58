"""Prediction for single image files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepmoe.costs import active_share, count_macs
from deepmoe.data import read_image
from deepmoe.errors import UserError
from deepmoe.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Prediction:
    """The most probable class of an image, and what it cost to say so."""

    image: str
    label: str
    probability: float
    macs: int
    active: float


@torch.inference_mode()
def predict(checkpoint: Checkpoint, images: Sequence[str | Path]) -> list[Prediction]:
    """Classifies image files, each resized to the size the model was trained on."""
    model, info = checkpoint.model, checkpoint.info
    if info.task != "classification":
        raise UserError(f"predict classifies images, but this model was trained for {info.task}")
    data = checkpoint.config.data
    predictions = []
    for path in images:
        x_BCHW = model.placed(info.normalise(read_image(path, info.size[0], data)[None]))
        output = model(x_BCHW)
        probability, index = output.logits.float().softmax(dim=1)[0].max(dim=0)
        gated = output.gates is not None
        predictions.append(
            Prediction(
                image=str(path),
                label=info.class_names[int(index)],
                probability=float(probability),
                macs=int(count_macs(model, info.size, output.gates)[0])
                if gated
                else count_macs(model, info.size),
                active=float(active_share(output.gates)[0]) if gated else 1.0,
            )
        )
    return predictions
