"""Prediction for single image files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepmoe.checkpoint import Checkpoint
from deepmoe.config import GIVEN
from deepmoe.data import read_image
from deepmoe.data.torch_datasets import UNKNOWN_STD
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import summed_costs


@dataclass(frozen=True)
class Prediction:
    """The most probable class of an image, and what it cost to say so."""

    image: str
    label: str
    probability: float
    macs: int
    active: float  # share of the gated channels that ran
    answered_by: str  # embedding or network


@dataclass(frozen=True)
class Unanswered:
    """An image that could not be judged, and why."""

    image: str
    error: str


@torch.inference_mode()
def predict(checkpoint: Checkpoint, images: Sequence[str | Path]) -> list[Prediction | Unanswered]:
    """Classifies image files, each resized to the size the model was trained on.

    A file that can't be read, or makes the model's outputs infinite, does not keep the others
    from being answered.

    Raises:
        UserError: where the model is no classifier, or its weights are not finite.
    """
    if checkpoint.info.task != "classification":
        task = checkpoint.info.task
        raise UserError(f"predict classifies images, but this model was trained for {task}")
    if checkpoint.config.data.name == GIVEN and checkpoint.info.std == UNKNOWN_STD:
        raise UserError(
            "the model learnt from datasets that did not say how images are normalised: "
            "train it with fit(..., info=DataInfo(...))"
        )
    checkpoint.model.check_finite()
    answers: list[Prediction | Unanswered] = []
    for path in images:
        try:
            answers.append(_predict(checkpoint, path))
        except UserError as error:
            answers.append(Unanswered(str(path), str(error)))
    return answers


def _predict(checkpoint: Checkpoint, path: str | Path) -> Prediction:
    model, info = checkpoint.model, checkpoint.info
    image = read_image(path, info.size[0], checkpoint.config.data)
    output = model(model.as_input(info.normalise(image[None])))
    probability, index = output.logits.float().softmax(dim=1)[0].max(dim=0)
    if not probability.isfinite():
        raise UserError(f"the model's outputs for {path} are not finite")
    macs, active = summed_costs(model, info.size, output)
    exited = output.exited is not None and bool(output.exited[0])
    return Prediction(
        image=str(path),
        label=info.class_names[int(index)],
        probability=float(probability),
        macs=int(macs),
        active=float(active),
        answered_by="embedding" if exited else "network",
    )
