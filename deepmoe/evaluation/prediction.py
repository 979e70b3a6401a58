"""Prediction for image files."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepmoe.checkpoint import Checkpoint
from deepmoe.config import GIVEN
from deepmoe.costs import dense_macs, format_macs
from deepmoe.data import read_image
from deepmoe.data.torch_datasets import UNKNOWN_STD
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import summed_costs
from deepmoe.evaluation.segmentation_prediction import SegmentationPrediction, segment
from deepmoe.figures import bars
from deepmoe.timing import timed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = 3  # classes that are told, unless asked for others


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, and what it cost to say so.

    Attributes:
        image: the file.
        top: classes and their probabilities, the most probable first.
        macs: that ran, embedding and gates included.
        dense_macs: of the base network with all channels.
        active: share of the gated channels that ran.
        answered_by: `embedding` or `network`.
        ms: milliseconds in the model.
        exits: whether the model has some, so that the embedding might have answered.
    """

    image: str
    top: tuple[tuple[str, float], ...]
    macs: int
    dense_macs: int
    active: float
    answered_by: str
    ms: float
    exits: bool = False

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.top[0][0]

    @property
    def probability(self) -> float:
        """That of the most probable class."""
        return self.top[0][1]

    def __str__(self) -> str:
        classes = ", ".join(f"{label} {probability:.1%}" for label, probability in self.top)
        cost = f"{format_macs(self.macs)} MACs ({self.macs / self.dense_macs:.1%} of dense)"
        by = f", answered by the {self.answered_by}" if self.exits else ""
        return f"{self.image}: {classes}; {cost}, {self.ms:.1f} ms{by}"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        top = [{"label": label, "probability": p} for label, p in self.top]
        first = {"image": self.image, "label": self.label, "probability": self.probability}
        return {**first, **asdict(self), "top": top}

    def plot(self) -> "Figure":
        """The probabilities of the classes."""
        shares = {label: 100 * probability for label, probability in self.top}
        return bars(shares, "probability, %", f"{self.image}: {self.label}")


@dataclass(frozen=True)
class Unanswered:
    """An image that could not be judged, and why."""

    image: str
    error: str

    def __str__(self) -> str:
        return self.error

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)


Answer = Prediction | SegmentationPrediction | Unanswered


def predict(checkpoint: Checkpoint, images: Iterable[str | Path], top: int = TOP) -> list[Answer]:
    """Judges image files: their classes, or for segmentation those of their pixels.

    A file that can't be read, or makes the model's outputs infinite, does not keep the others
    from being answered.

    Args:
        checkpoint: such as `load_checkpoint` gives.
        images: files; for classification they are resized to the size the model was trained on.
        top: how many classes to tell.

    Raises:
        UserError: where the model's weights are not finite, or it does not know how images are
            normalised.
    """
    return list(predict_each(checkpoint, images, top))


def predict_each(
    checkpoint: Checkpoint, images: Iterable[str | Path], top: int = TOP
) -> Iterator[Answer]:
    """The same, one after the other."""
    if not isinstance(checkpoint, Checkpoint):
        raise UserError("predict takes a checkpoint, such as load_checkpoint gives")
    if isinstance(images, str | Path) or not isinstance(images, Iterable):
        raise UserError("predict takes a list of image files")
    if type(top) is not int or top < 1:
        raise UserError(f"top must be at least 1, not {top}")
    if checkpoint.config.data.name == GIVEN and checkpoint.info.std == UNKNOWN_STD:
        raise UserError(
            "the model was trained on datasets that did not say how images are normalised: "
            "train it with fit(..., info=DataInfo(...))"
        )
    checkpoint.model.check_finite()
    judge = segment if checkpoint.info.task == "segmentation" else _classify
    if judge is _classify:
        _warm_up(checkpoint)
    for path in images:
        if not isinstance(path, str | Path):  # a number would be an open file of this process
            raise UserError(f"predict takes names of image files, not {path!r}")
        try:
            yield judge(checkpoint, path, top)
        except UserError as error:
            yield Unanswered(str(path), str(error))


@torch.inference_mode()
def _classify(checkpoint: Checkpoint, path: str | Path, top: int) -> Prediction:
    model, info = checkpoint.model, checkpoint.info
    image = read_image(path, info.size[0], checkpoint.config.data)
    x_BCHW = model.as_input(info.normalise(image[None]))
    output, seconds = timed(partial(model, x_BCHW), x_BCHW.device)
    probabilities = output.logits.float().softmax(dim=1)[0]
    if not bool(probabilities.isfinite().all()):
        raise UserError(f"the model's outputs for {path} are not finite")
    values, indices = probabilities.topk(min(top, info.classes))
    macs, active = summed_costs(model, info.size, output)
    exited = output.exited is not None and bool(output.exited[0])
    names = [info.class_names[index] for index in indices.tolist()]
    return Prediction(
        image=str(path),
        top=tuple(zip(names, values.tolist(), strict=True)),
        macs=int(macs),
        dense_macs=dense_macs(model, info.size),
        active=float(active),
        answered_by="embedding" if exited else "network",
        ms=1e3 * seconds,
        exits=model.exit_at is not None,
    )


@torch.inference_mode()
def _warm_up(checkpoint: Checkpoint) -> None:
    """The first call prepares what later ones use: its time would say nothing of an image."""
    model, info = checkpoint.model, checkpoint.info
    model(model.as_input(torch.zeros(1, model.gating.graph.colours, *info.size)))
