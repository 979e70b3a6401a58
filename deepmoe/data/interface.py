"""What every data set offers, whatever it is read from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deepmoe.data.info import DataInfo

Batch = tuple[Tensor, Tensor]
"""Normalised images_BCHW, and labels_B (classification) or labels_BHW (segmentation)."""


class Loader(Protocol):
    """Gives batches; any training epoch can be replayed, from any batch on."""

    @property
    def batches_per_epoch(self) -> int:
        """Length of a training epoch."""

    @property
    def images(self) -> int:
        """How many images an iteration goes over, in this process."""

    @property
    def skipped(self) -> int:
        """How many files could not be read so far."""

    def __iter__(self) -> Iterator[Batch]:
        """Every image once, in order, not augmented."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """A training epoch, shuffled and augmented, from batch `start` on."""


@dataclass(frozen=True)
class DataSource:
    """A data set, opened."""

    info: DataInfo
    train: Loader
    evaluation: Loader  # the test set, or the held-out training images
    calibration: Loader  # images that a compute budget or a codebook may be fitted on
    evaluation_name: str  # "test", "holdout", or the split's own name such as "val"
