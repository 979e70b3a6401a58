"""Batches in an order that depends on seed and epoch alone, so that any epoch can be replayed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.augment import Views, look_at, random_views
from deepmoe.data.info import DataInfo
from deepmoe.data.split import Split
from deepmoe.errors import UserError


@dataclass(frozen=True)
class Shard:
    """One process of several that share every batch."""

    rank: int = 0
    count: int = 1

    def part_of(self, batch_size: int) -> slice:
        """Which images of a global batch are this process's."""
        if batch_size % self.count:
            raise UserError(
                f"a batch of {batch_size} can't be shared evenly by {self.count} devices"
            )
        size = batch_size // self.count
        return slice(self.rank * size, (self.rank + 1) * size)


WHOLE = Shard()


class BatchLoader:
    """Cuts a split that lies in memory into normalised batches (images, labels).

    Iterating gives every image once, in order. `epoch(n)` gives the n-th training epoch: shuffled,
    augmented, without the incomplete last batch.

    Args:
        split: the images; they are moved to `device` as uint8, once.
        info: mean and standard deviation to normalise with.
        batch_size: images a batch, over all shards.
        augment: crop and mirror of training epochs; `None` for neither.
        seed: of shuffling and augmentation.
        device: where batches are made.
        shard: which part of every batch this process gets. The whole batch is drawn alike in every
            process, so that the number of processes changes nothing.
    """

    def __init__(
        self,
        split: Split,
        info: DataInfo,
        batch_size: int,
        *,
        augment: DataConfig | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
    ) -> None:
        self.split = split.to(device)
        self.info = info
        self.batch_size = min(batch_size, len(split))
        self.augment = augment
        self.seed = seed
        self.device = torch.device(device)
        self.shard = shard

    @property
    def batches_per_epoch(self) -> int:
        """Length of a training epoch."""
        return len(self.split) // self.batch_size

    @property
    def images(self) -> int:
        """How many images an iteration goes over, in this process."""
        return len(range(self.shard.rank, len(self.split), self.shard.count))

    @property
    def skipped(self) -> int:
        """Images in memory are never skipped."""
        return 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        mine = slice(self.shard.rank, None, self.shard.count)
        images, labels = self.split.images[mine], self.split.labels[mine]
        for start in range(0, len(labels), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield self.info.normalise(images[part]), labels[part]

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one training epoch, from batch `start` on."""
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.seed, number))
        order = torch.randperm(len(self.split), generator=generator, device=self.device)
        part = self.shard.part_of(self.batch_size)
        for batch in range(start, self.batches_per_epoch):
            # A seed of its own for each batch, so that an epoch can be entered anywhere.
            generator.manual_seed(derive_seed(self.seed, number, batch))
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            images, labels = self.split.images[chosen], self.split.labels[chosen]
            if self.augment is not None:
                views = self._views(len(images), generator)
                images = look_at(images, views, self.augment.crop_padding)
            yield self.info.normalise(images[part]), labels[part]

    def _views(self, count: int, generator: torch.Generator) -> Views:
        assert self.augment is not None
        return random_views(count, self.augment.crop_padding, self.augment.mirror, generator)


class ViewLoader(BatchLoader):
    """Shows every image in one of a few views, the next one in each epoch; else as `BatchLoader`.

    Views depend on a seed of their own, the order of images on the run's. So whatever was found out
    about the views once can be used by any number of runs, also of a part of the images.

    Args:
        loader: of training images.
        views: how many there are of an image.
        seed: of the views.
        numbers: of the loader's images among those that views are drawn for.
        drawn: how many of those there are.
    """

    def __init__(
        self, loader: BatchLoader, views: int, seed: int, numbers: Tensor, drawn: int
    ) -> None:
        super().__init__(
            loader.split,
            loader.info,
            loader.batch_size,
            augment=loader.augment,
            seed=loader.seed,
            device=loader.device,
            shard=loader.shard,
        )
        self.views = views
        self.view_seed = seed
        self.numbers = numbers.to(self.device)
        self.drawn = drawn

    def view(self, number: int) -> Iterator[Tensor]:
        """All images in their view of this number, in order, in batches."""
        views = self._views_of(number)
        for start in range(0, len(self.split), self.batch_size):
            end = min(start + self.batch_size, len(self.split))
            yield self._seen(torch.arange(start, end, device=self.device), views)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one training epoch, from batch `start` on."""
        views = self._views_of(number % self.views)
        for chosen in self.chosen(number, start):
            yield self._seen(chosen, views), self.split.labels[chosen]

    def chosen(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Which images the batches of an epoch are made of, in this process."""
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(len(self.split), generator=generator, device=self.device)
        part = self.shard.part_of(self.batch_size)
        for batch in range(start, self.batches_per_epoch):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size][part]

    def _views_of(self, number: int) -> Views | None:
        if self.augment is None:
            return None
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.view_seed, number))
        return self._views(self.drawn, generator)

    def _seen(self, chosen: Tensor, views: Views | None) -> Tensor:
        images = self.split.images[chosen]
        if views is not None and self.augment is not None:
            views = views.of(self.numbers[chosen])
            images = look_at(images, views, self.augment.crop_padding)
        return self.info.normalise(images)


def derive_seed(*parts: int) -> int:
    """One well-mixed seed from several small numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])
