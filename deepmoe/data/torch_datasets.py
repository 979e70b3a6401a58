"""Anybody's torch datasets as a `DataSource`: shuffled, replayable, read by worker processes."""

import os
import random
from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from deepmoe.config import DataConfig
from deepmoe.data.info import DataInfo, Task
from deepmoe.data.interface import DataSource
from deepmoe.data.loader import WHOLE, Shard
from deepmoe.data.reading import Unreadable
from deepmoe.data.workers import WorkerLoader
from deepmoe.errors import UserError

MOST_CALIBRATION = 4096
UNKNOWN_MEAN, UNKNOWN_STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)  # of images that came normalised


class DatasetReader:
    """Reads items of a torch dataset (a `SampleReader`).

    What is random in a dataset repeats itself: its generators (Python's, NumPy's and PyTorch's) get
    a seed for every item.

    Args:
        dataset: of pairs (normalised float image_CHW, label).
        info: what its images are.
        what: it is for, in messages.
        colours: channels of its images.
        items: which of its items, in which order; all of them if not given.
    """

    def __init__(
        self,
        dataset: Any,
        info: DataInfo,
        what: str,
        colours: int = 3,
        items: np.ndarray | None = None,
    ) -> None:
        self.dataset = dataset
        self.info = info
        self.what = what
        self.colours = colours
        self.items = np.arange(len(dataset)) if items is None else items

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        """The item, for messages."""
        return f"item {self.items[index]} of the {self.what} data"

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """An image and its label.

        Raises:
            Unreadable: where the item is not such a pair, or its file can't be read.
        """
        seed = 0 if rng is None else int(rng.integers(2**32))
        try:
            item = _read_with_seed(self.dataset, int(self.items[index]), seed)
        except OSError as error:
            raise Unreadable(str(error)) from error
        image, label = as_pair(item)
        expected = (self.colours, *self.info.size)
        if tuple(image.shape) != expected:
            raise Unreadable(f"its image has shape {tuple(image.shape)}, not {expected}")
        if self.info.task == "classification" and not 0 <= int(label) < self.info.classes:
            raise Unreadable(f"its label is {int(label)}, not from 0 to {self.info.classes - 1}")
        return image, label

    def finish(
        self, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Images are as the dataset gives them."""
        return images, labels


def as_pair(item: Any) -> tuple[Tensor, Tensor]:
    """An item of a dataset as image and label.

    Raises:
        Unreadable: where it is something else.
    """
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise Unreadable(f"it is a {type(item).__name__}, not a pair of image and label")
    image, label = item
    if not isinstance(image, Tensor) or not image.is_floating_point() or image.dim() != 3:
        kind = f"{image.dtype} of {image.dim()} dimensions" if isinstance(image, Tensor) else ""
        raise Unreadable(
            f"its image is a {kind or type(image).__name__}: the dataset's transform should give "
            "normalised float tensors of three dimensions"
        )
    label = torch.as_tensor(label)
    if label.is_floating_point() or label.is_complex() or label.dim() not in (0, 2):
        raise Unreadable("its label is neither a whole number nor a map of such")
    return image.float(), label.long()


def open_datasets(
    train: Dataset,
    evaluation: Dataset,
    config: DataConfig,
    classes: int,
    *,
    colours: int = 3,
    batch_size: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    info: DataInfo | None = None,
) -> DataSource:
    """Datasets as what training takes.

    Args:
        train: to learn from; what is random in it is an augmentation.
        evaluation: to evaluate on.
        config: workers, and how many unreadable items are borne.
        classes: of the model.
        colours: channels of the images that the model takes.
        batch_size: images a training batch, over all shards.
        seed: of shuffling and of what is random in the datasets.
        device: where batches are used.
        shard: which part of every batch this process gets.
        info: names of the classes, and how the images were normalised; what can be found out if
            not given.

    Raises:
        UserError: where a dataset is empty, has no length, or gives something else than pairs of
            normalised image and label.
    """
    for dataset, what in ((train, "training"), (evaluation, "validation")):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"the {what} data must be a map-style dataset, not a {type(dataset).__name__} "
                "without numbered items"
            )
        if not isinstance(dataset, Sized) or not len(dataset):
            raise UserError(f"the {what} data is empty, or has no length")
    found = info or _look_at(train, classes)
    if found.classes != classes:
        raise UserError(f"the model has {classes} classes, but the data has {found.classes}")

    def loader(dataset: Dataset, what: str, items: np.ndarray | None, part: Shard) -> WorkerLoader:
        return WorkerLoader(
            DatasetReader(dataset, found, what, colours, items),
            batch_size,
            seed=seed,
            device=device,
            shard=part,
            workers=_workers(dataset, config),
            unreadable_limit=config.unreadable_limit,
        )

    count = len(train)  # type: ignore[arg-type]
    some = np.random.default_rng(seed).permutation(count)[:MOST_CALIBRATION]
    return DataSource(
        found,
        train=loader(train, "training", None, shard),
        evaluation=loader(evaluation, "validation", None, shard),
        calibration=loader(train, "training", some, WHOLE),
        evaluation_name="validation",
    )


def _workers(dataset: Dataset, config: DataConfig) -> int:
    """None where items lie in memory, and no more than there are cores."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    in_memory = isinstance(dataset, TensorDataset)
    return 0 if in_memory else min(config.workers, os.cpu_count() or 1)


def _look_at(dataset: Any, classes: int) -> DataInfo:
    try:
        image, label = as_pair(_read_with_seed(dataset, 0, 0))
    except Unreadable as error:
        raise UserError(f"item 0 of the training data can't be used: {error}") from error
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or len({*map(str, names)}) != classes:
        names = range(classes)
    size = (image.shape[1], image.shape[2])
    task: Task = "classification" if label.dim() == 0 else "segmentation"
    return DataInfo(tuple(map(str, names)), size, UNKNOWN_MEAN, UNKNOWN_STD, task)


def _read_with_seed(dataset: Any, index: int, seed: int) -> Any:
    """An item; whatever is random in it depends on the seed alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return dataset[index]
