"""Batches in an order that depends on seed and epoch alone, so that any epoch can be replayed."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.augment import random_crop, random_mirror
from deepmoe.data.dataset import ImageInfo
from deepmoe.data.split import Split


class BatchLoader:
    """Cuts a split into normalised batches (images, labels).

    Iterating gives every image once, in order. `epoch(n)` gives the n-th training epoch: shuffled,
    augmented, without the incomplete last batch.

    Args:
        split: the images; they are moved to `device` as uint8, once.
        info: mean and standard deviation to normalise with.
        batch_size: images a batch.
        augment: crop and mirror of training epochs; `None` for neither.
        seed: of shuffling and augmentation.
        device: where batches are made.
    """

    def __init__(
        self,
        split: Split,
        info: ImageInfo,
        batch_size: int,
        *,
        augment: DataConfig | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.split = split.to(device)
        self.info = info
        self.batch_size = min(batch_size, len(split))
        self.augment = augment
        self.seed = seed
        self.device = torch.device(device)

    @property
    def batches_per_epoch(self) -> int:
        """Length of a training epoch."""
        return len(self.split) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.split), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield self.info.normalise(self.split.images[part]), self.split.labels[part]

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one training epoch."""
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.seed, number))
        order = torch.randperm(len(self.split), generator=generator, device=self.device)
        for batch in range(self.batches_per_epoch):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            images, labels = self.split.images[chosen], self.split.labels[chosen]
            if self.augment is not None:
                images = random_crop(images, self.augment.crop_padding, generator)
                images = random_mirror(images, generator) if self.augment.mirror else images
            yield self.info.normalise(images), labels


def derive_seed(*parts: int) -> int:
    """One well-mixed seed from several small numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])
