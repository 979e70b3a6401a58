"""Loading of image files: decoded by worker processes, finished in batches on the device."""

import logging
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from deepmoe.data.loader import WHOLE, Shard, derive_seed
from deepmoe.data.reading import Unreadable
from deepmoe.data.worker_processes import ignore_signals, load_batches
from deepmoe.errors import UserError

LOG = logging.getLogger("deepmoe")
MOST_REPLACEMENTS = 100  # of an unreadable training image by its successors


class SampleReader(Protocol):
    """Reads single samples in worker processes, and finishes whole batches on the device."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The sample's file, for messages."""

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """uint8 image_CHW and its label; cropped at random with `rng`, as for evaluation without.

        Raises:
            Unreadable: where the file can't be used.
        """

    def finish(
        self, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The rest, batched: random changes with `generator`, none without; normalisation."""


class WorkerLoader:
    """Batches of image files (a `Loader`).

    Unreadable files are skipped and counted: in training, the next readable file takes the place of
    one, so that every batch is full.

    Args:
        reader: the samples.
        batch_size: images a training batch, over all shards; `evaluation_batch` else.
        seed: of shuffling and augmentation.
        device: where batches are finished.
        shard: which part of every batch this process gets.
        workers: decoding processes; 0 decodes in this one.
        unreadable_limit: share of the files that may be skipped before a UserError stops the run.
        evaluation_batch: images a batch when iterating.
    """

    def __init__(
        self,
        reader: SampleReader,
        batch_size: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
        workers: int = 4,
        unreadable_limit: float = 0.01,
        evaluation_batch: int = 64,
    ) -> None:
        self.reader = reader
        self.batch_size = min(batch_size, len(reader))
        self.seed = seed
        self.device = torch.device(device)
        self.shard = shard
        self.workers = workers
        self.unreadable_limit = unreadable_limit
        self.evaluation_batch = evaluation_batch
        self.unreadable: set[int] = set()
        self._order = _Order()
        self._loader: DataLoader | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Length of a training epoch."""
        return len(self.reader) // self.batch_size

    @property
    def images(self) -> int:
        """How many images an iteration goes over, in this process."""
        return len(range(self.shard.rank, len(self.reader), self.shard.count))

    @property
    def skipped(self) -> int:
        """How many files could not be read so far."""
        return len(self.unreadable)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        mine = range(self.shard.rank, len(self.reader), self.shard.count)
        size = self.evaluation_batch
        batches = [list(mine[start : start + size]) for start in range(0, len(mine), size)]
        seen = 0
        for images, labels in self._batches([[(None, i) for i in batch] for batch in batches]):
            seen += len(images)
            if len(images):
                yield self.reader.finish(images, labels, None)
        if mine and not seen:
            raise UserError(
                f"none of {len(mine)} files like {self.reader.name(mine[0])} can be read"
            )

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one training epoch, from batch `start` on."""
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.reader))
        part, size = self.shard.part_of(self.batch_size), self.batch_size
        numbers = range(start, self.batches_per_epoch)
        chosen = [order[b * size : (b + 1) * size][part].tolist() for b in numbers]
        generator = torch.Generator(self.device)
        loaded = self._batches([[(number, i) for i in batch] for batch in chosen])
        for batch, wanted, (images, labels) in zip(numbers, chosen, loaded, strict=True):
            if len(images) < len(wanted):
                raise UserError("too many training files in a row can't be read")
            generator.manual_seed(derive_seed(self.seed, number, batch, self.shard.rank))
            yield self.reader.finish(images, labels, generator)

    def _batches(
        self, order: list[list[tuple[int | None, int]]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each batch that can be read."""
        self._order.batches = order
        if self._loader is None:
            # Made once: its workers live as long as this loader, and only the order changes.
            self._loader = DataLoader(
                _Samples(self.reader, self.seed),
                batch_sampler=self._order,
                num_workers=self.workers,
                collate_fn=_collate,
                pin_memory=self.device.type == "cuda",
                persistent_workers=self.workers > 0,
                worker_init_fn=ignore_signals,
            )
        for images, labels, unreadable in load_batches(self._loader):
            self._count(unreadable)
            device = self.device
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def _count(self, unreadable: list[tuple[int, str]]) -> None:
        for index, reason in unreadable:
            if index not in self.unreadable:
                self.unreadable.add(index)
                LOG.warning("skipped %s: %s", self.reader.name(index), reason)
        seen = len(self.reader) / self.shard.count  # by this process
        if unreadable and len(self.unreadable) > self.unreadable_limit * seen:
            index, reason = unreadable[-1]
            raise UserError(
                f"{len(self.unreadable)} of {seen:.0f} files could not be read, more than "
                f"data.unreadable_limit = {self.unreadable_limit:.2%} allows; the last was "
                f"{self.reader.name(index)} ({reason})"
            )


class _Order:
    """A batch sampler whose batches are set anew before each pass."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int | None, int]]] = []

    def __iter__(self) -> Iterator[list[tuple[int | None, int]]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Samples(Dataset):
    """Reads (epoch, index); an epoch of `None` is evaluation."""

    def __init__(self, reader: SampleReader, seed: int) -> None:
        self.reader = reader
        self.seed = seed

    def __getitem__(self, key: tuple[int | None, int]) -> tuple[Any, Any, list[tuple[int, str]]]:
        epoch, index = key
        unreadable: list[tuple[int, str]] = []
        tries = 1 if epoch is None else min(MOST_REPLACEMENTS, len(self.reader))
        for step in range(tries):
            at = (index + step) % len(self.reader)
            rng = None if epoch is None else np.random.default_rng([self.seed, epoch, index, step])
            try:
                return (*self.reader.read(at, rng), unreadable)
            except Unreadable as error:
                unreadable.append((at, str(error)))
        return None, None, unreadable


def _collate(samples: list[tuple[Any, Any, list[tuple[int, str]]]]) -> tuple[Any, Any, Any]:
    unreadable = [entry for _, _, entries in samples for entry in entries]
    readable = [(image, label) for image, label, _ in samples if image is not None]
    if not readable:
        return torch.empty(0), torch.empty(0), unreadable
    images, labels = zip(*readable, strict=True)
    return torch.stack(images), torch.stack(labels), unreadable
