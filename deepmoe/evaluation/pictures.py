"""Images as pictures, with what they ran."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from deepmoe.data import DataInfo
from deepmoe.evaluation.batches import Batches, batches_for
from deepmoe.evaluation.gate_record import GateRecord
from deepmoe.model import DeepMoE

MOST_SIDE = 320  # pixels of a picture: more than a page shows


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, what the model said of it, and what it ran.

    Attributes:
        number: of the image, among those that were gone through.
        pixels: uint8, (height, width, colours).
        mask: of segmentation, the class that each pixel was given, (height, width).
        label: the right class; `None` for segmentation.
        prediction: the class that was given.
        score: 1 for a right answer, 0 for a wrong one; or the share of the pixels that are right.
        macs: that were spent.
        exited: whether the embedding answered, and the base network never ran.
        expert: the number of the expert that ran, if there are experts.
        active: share of the channels that ran, for each gated layer.
    """

    number: int
    pixels: np.ndarray
    mask: np.ndarray | None
    label: str | None
    prediction: str | None
    score: float
    macs: int
    exited: bool
    expert: int | None
    active: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the pixels."""
        values = {k: v for k, v in vars(self).items() if k not in ("pixels", "mask")}
        return {**values, "score": None if np.isnan(self.score) else self.score}


def by_cost(record: GateRecord, count: int) -> tuple[list[int], list[int]]:
    """Numbers of the cheapest images and of the dearest, that one first; none in both.

    Of each class there are two at most, where there are enough classes: images of one class often
    take the same route.
    """
    order = np.argsort(record.macs, kind="stable").tolist()
    count = min(count, len(order) // 2) or len(order)
    cheapest = _mixed(order, record.labels, count)
    rest = [number for number in reversed(order) if number not in set(cheapest)]
    return cheapest, _mixed(rest, record.labels, count)


def _mixed(numbers: list[int], labels: np.ndarray | None, count: int) -> list[int]:
    """The first so many, without a third of any class if others are there."""
    if labels is None:
        return numbers[:count]
    most = max(2, -(-count // len(np.unique(labels))))
    chosen: list[int] = []
    seen: Counter[int] = Counter()
    for number in numbers:
        label = int(labels[number])
        if len(chosen) < count and seen[label] < most:
            chosen.append(number)
            seen[label] += 1
    return chosen


@torch.inference_mode()
def show_images(
    model: DeepMoE, batches: Batches, info: DataInfo, record: GateRecord, numbers: Sequence[int]
) -> list[Picture]:
    """Pictures of some of the images that a record is of, in this order."""
    found: dict[int, Picture] = {}
    start = 0
    for x_BCHW, _ in batches_for(model, batches):
        inside = [number for number in numbers if start <= number < start + len(x_BCHW)]
        for number in inside:
            found[number] = _picture(model, x_BCHW[number - start], info, record, number)
        start += len(x_BCHW)
    return [found[number] for number in numbers]


def _picture(
    model: DeepMoE, x_CHW: Tensor, info: DataInfo, record: GateRecord, number: int
) -> Picture:
    pixels = info.to_pixels(x_CHW[None])[0].permute(1, 2, 0).cpu().numpy()
    mask = None
    if info.task == "segmentation":
        mask = model(x_CHW[None]).logits.argmax(dim=1)[0].to(torch.uint8).cpu().numpy()

    def name(column: np.ndarray | None) -> str | None:
        return None if column is None else record.class_names[int(column[number])]

    return Picture(
        number=int(number),
        pixels=_small(pixels, Image.Resampling.LANCZOS),
        mask=None if mask is None else _small(mask, Image.Resampling.NEAREST),
        label=name(record.labels),
        prediction=name(record.predictions),
        score=float("nan") if record.scores is None else float(record.scores[number]),
        macs=int(record.macs[number]),
        exited=record.exited is not None and bool(record.exited[number]),
        expert=None if record.experts is None else int(record.experts[number]),
        active=tuple(float((gates[number] != 0).mean()) for gates in record.gates),
    )


def _small(pixels: np.ndarray, how: Image.Resampling) -> np.ndarray:
    image = Image.fromarray(pixels)
    image.thumbnail((MOST_SIDE, MOST_SIDE), how)
    return np.asarray(image)
