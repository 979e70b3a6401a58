"""Images and labels that belong together."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
