"""Images and labels that belong together."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmoe.errors import UserError

LOG = logging.getLogger("deepmoe")
MOST_NAMED = 5


@dataclass(frozen=True)
class Split:
    """uint8 images_NCHW and int64 labels_N."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> "Split":
        return Split(self.images[index], self.labels[index])

    def to(self, device: torch.device | str) -> "Split":
        """A copy on another device."""
        return Split(self.images.to(device), self.labels.to(device))


def hold_out(train: Split, count: int) -> tuple[Split, Split]:
    """Sets `count` images aside, spread evenly over the classes; returns the rest and them."""
    if count >= len(train):
        raise UserError(f"data.holdout is {count}, but there are only {len(train)} training images")
    # Sorted by position within the class, the first `count` images are spread evenly over classes.
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    labels = train.labels[order]
    rank = torch.zeros_like(labels)
    for label in labels.unique():
        of_class = labels == label
        rank[of_class] = torch.arange(int(of_class.sum()))
    order = order[torch.argsort(rank, stable=True)]
    return train[order[count:]], train[order[:count]]


def tell_missing(classes: Sequence[str], labels: np.ndarray, what: str) -> None:
    """Warns of classes without images: no figure shows whether they are recognised."""
    there = set(np.unique(labels).tolist())
    missing = [name for label, name in enumerate(classes) if label not in there]
    if missing:
        count = f"{len(missing)} of {len(classes)}"
        LOG.warning("%s classes have no %s images: %s", count, what, some_of(missing))


def some_of(names: Sequence[str]) -> str:
    """A few names, for a message."""
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
