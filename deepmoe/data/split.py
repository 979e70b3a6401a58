"""Images and labels that belong together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepmoe.errors import UserError


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
