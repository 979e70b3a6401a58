"""A data set by name: what it is, and loaders to train and to evaluate with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.cifar import read_cifar
from deepmoe.data.digits import DIGITS_SIZE, read_digits
from deepmoe.data.info import DataInfo
from deepmoe.data.loader import BatchLoader, Shard
from deepmoe.data.split import Split
from deepmoe.errors import UserError

Batch = tuple[Tensor, Tensor]
"""Normalised images_BCHW, and labels_B (classification) or labels_BHW (segmentation)."""


class Loader(Protocol):
    """Gives batches; any training epoch can be replayed, from any batch on."""

    @property
    def batches_per_epoch(self) -> int:
        """Length of a training epoch."""

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
    evaluation_name: str  # "test" or "holdout"


def open_data(
    config: DataConfig,
    *,
    batch_size: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    shard: Shard = Shard(),
) -> DataSource:
    """Opens the data set that a configuration names.

    Args:
        config: name, place and augmentation.
        batch_size: images a training batch, over all shards.
        seed: of shuffling and augmentation.
        device: where batches are made.
        shard: which part of every batch this process gets.

    Raises:
        UserError: where the data is missing, damaged or not what it should be.
    """
    if config.name == "image-folder":
        from deepmoe.data.image_folder import open_image_folder  # which needs this module

        return open_image_folder(
            config, batch_size=batch_size, seed=seed, device=device, shard=shard
        )
    if config.name == "digits":
        train, test, names = read_digits(config.size or DIGITS_SIZE)
    else:
        if config.size not in (None, 32):
            raise UserError(f"{config.name} has images of 32 px; data.size can't be {config.size}")
        train, test, names = read_cifar(config.root, config.name)
    info = _measure(train, names)
    evaluation, evaluation_name = test, "test"
    if config.holdout:
        # So that recipes can be chosen without looking at the test set.
        (train, evaluation), evaluation_name = hold_out(train, config.holdout), "holdout"
    return DataSource(
        info,
        BatchLoader(train, info, batch_size, augment=config, seed=seed, device=device, shard=shard),
        BatchLoader(evaluation, info, EVALUATION_BATCH, device=device, shard=shard),
        evaluation_name,
    )


EVALUATION_BATCH = 500


def _measure(train: Split, names: tuple[str, ...]) -> DataInfo:
    # In parts: a float copy of the whole data set would be needless.
    parts = [part.double() / 255 for part in train.images.split(4096)]
    pixels = train.images[:, 0].numel()
    mean = torch.stack([part.sum(dim=(0, 2, 3)) for part in parts]).sum(dim=0) / pixels
    square = torch.stack([part.square().sum(dim=(0, 2, 3)) for part in parts]).sum(dim=0) / pixels
    std = (square - mean.square()).clamp_min(1e-6).sqrt()
    size = (train.images.shape[2], train.images.shape[3])
    return DataInfo(names, size, tuple(mean.tolist()), tuple(std.tolist()))


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
