"""ImageNet's layout: `train/CLASS/*.jpeg` and `val/CLASS/*.jpeg`, in a folder or a zip file."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.augment import random_mirror
from deepmoe.data.color import random_jitter, random_lighting
from deepmoe.data.decode import Box, decode_box
from deepmoe.data.files import FileTree
from deepmoe.data.info import IMAGENET_MEAN, IMAGENET_STD, DataInfo
from deepmoe.data.interface import DataSource
from deepmoe.data.loader import Shard
from deepmoe.data.split import Split, hold_out
from deepmoe.data.workers import Unreadable, WorkerLoader
from deepmoe.errors import UserError

DEFAULT_SIZE = 224  # the one that data.resize is meant for
MOST_CALIBRATION = 4096
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".tif", ".tiff")
TRAIN = "train"
EVALUATION = ("val", "validation", "test")  # the first that there is


@dataclass(frozen=True)
class ImageFolderReader:
    """Reads the images of one split (a `SampleReader`).

    Attributes:
        tree: the files.
        files_N: their names as encoded by `os.fsencode`. An array, because worker processes would
            come to copy a list of a million strings, each on its own.
        labels_N: int64.
        info: what the loaded images are.
        config: crops and augmentation.
    """

    tree: FileTree
    files_N: np.ndarray
    labels_N: np.ndarray
    info: DataInfo
    config: DataConfig

    def __len__(self) -> int:
        return len(self.labels_N)

    def name(self, index: int) -> str:
        """The sample's file, for messages."""
        return os.fsdecode(self.files_N[index])

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """uint8 image_CHW and its label; cropped at random with `rng`, as for evaluation without.

        Raises:
            Unreadable: where the file can't be used.
        """
        try:
            content = self.tree.read(self.name(index))
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from error
        size = self.info.size[0]
        if rng is None:
            image = decode_box(content, evaluation_box(self.config, size), size, shrink=False)
        else:
            image = decode_box(
                content, partial(random_box, rng, self.config.min_area), size, shrink=True
            )
        return image, torch.tensor(self.labels_N[index])

    def finish(
        self, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The rest, batched: random changes with `generator`, none without; normalisation."""
        if generator is not None:
            images = random_mirror(images, generator) if self.config.mirror else images
            if self.config.color_jitter:
                images = random_jitter(images, self.config.color_jitter, generator)
            if self.config.lighting:
                images = images + random_lighting(len(images), self.config.lighting, generator)
        return self.info.normalise(images), labels


def random_box(rng: np.random.Generator, min_area: float, width: int, height: int) -> Box:
    """A random part of an image: torchvision's RandomResizedCrop, to the letter.

    The share of the area is uniform in `min_area`..1, the logarithm of width / height in that of
    3/4..4/3. Where ten tries don't fit the image: its centre, as large as these ratios let it be.
    """
    narrowest, widest = 3 / 4, 4 / 3
    for _ in range(10):
        area = width * height * rng.uniform(min_area, 1)
        ratio = math.exp(rng.uniform(math.log(narrowest), math.log(widest)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            return left, top, left + w, top + h
    w = min(width, round(height * widest))
    h = min(height, round(width / narrowest))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def evaluation_box(config: DataConfig, size: int) -> Callable[[int, int], Box]:
    """What evaluation takes of an image, by its width and height."""
    return partial(centre_box, round(config.resize * size / DEFAULT_SIZE), size)


def centre_box(resize: int, size: int, width: int, height: int) -> Box:
    """The part that is left of an image whose shorter side is resized, then cut at the centre.

    Rounded as by torchvision's Resize(resize) and CenterCrop(size), but in the image's own pixels,
    so that one resize of this part does both.
    """
    shorter = min(width, height)
    resized = (int(resize * width / shorter), int(resize * height / shorter))
    left, top = (round((side - size) / 2) for side in resized)
    x, y = width / resized[0], height / resized[1]
    return left * x, top * y, min((left + size) * x, width), min((top + size) * y, height)


def list_images(
    tree: FileTree, names: list[str], split: str, classes: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Names (encoded as `ImageFolderReader` takes them) and labels of a split's images.

    Args:
        tree: the data set.
        names: of all its files.
        split: the folder that holds the split's class folders.
        classes: names of all classes, in the order of their labels.

    Raises:
        UserError: where the folder is missing, or a class is empty or unknown.
    """
    if split not in tree.folders():
        raise UserError(f"{tree.root} has no folder named {split}")
    folders = tree.folders(split)
    if not folders:
        raise UserError(f"{tree.root} has no class folders in {split}")
    label_of = {name: label for label, name in enumerate(classes)}
    for folder in folders:
        if folder not in label_of:
            raise UserError(f"{tree.root} has a class {folder} in {split}, but not in {TRAIN}")
    start = split + "/"
    images = [n for n in names if n.startswith(start) and n.lower().endswith(SUFFIXES)]
    images = [name for name in images if name.count("/") > 1]  # not those outside of classes
    labels = np.array([label_of[name.split("/")[1]] for name in images], dtype=np.int64)
    there = set(labels.tolist())
    for folder in folders:
        if label_of[folder] not in there:
            raise UserError(f"{tree.root} has no images in {split}/{folder}")
    return np.array([os.fsencode(name) for name in images]), labels


def open_image_folder(
    config: DataConfig,
    *,
    batch_size: int,
    seed: int,
    device: torch.device | str,
    shard: Shard,
) -> DataSource:
    """Opens a folder or zip file in ImageNet's layout; arguments as of `open_data`.

    Raises:
        UserError: where a folder is missing or empty, or an option can't be.
    """
    size = _check(config)
    tree = FileTree.open(config.root, TRAIN)
    names = tree.names()
    classes = tree.folders(TRAIN)
    train = list_images(tree, names, TRAIN, classes)
    if config.holdout:
        # So that recipes can be chosen without looking at the test set.
        positions = Split(torch.arange(len(train[0])), torch.from_numpy(train[1]))
        kept, held = (p.images.sort()[0].numpy() for p in hold_out(positions, config.holdout))
        train, evaluation = (train[0][kept], train[1][kept]), (train[0][held], train[1][held])
    else:
        evaluation = list_images(tree, names, _evaluation_folder(tree), classes)
    info = DataInfo(tuple(classes), (size, size), IMAGENET_MEAN, IMAGENET_STD)

    def loader(files: np.ndarray, labels: np.ndarray) -> WorkerLoader:
        return WorkerLoader(
            ImageFolderReader(tree, files, labels, info, config),
            batch_size,
            seed=seed,
            device=device,
            shard=shard,
            workers=config.workers,
            unreadable_limit=config.unreadable_limit,
        )

    name = "holdout" if config.holdout else "test"
    # In order, training files are sorted by class: a budget is calibrated on some of every class.
    positions = Split(torch.arange(len(train[0])), torch.from_numpy(train[1]))
    some = hold_out(positions, min(MOST_CALIBRATION, len(train[0]) // 2))[1].images.numpy()
    return DataSource(
        info,
        train=loader(*train),
        evaluation=loader(*evaluation),
        calibration=loader(train[0][some], train[1][some]),
        evaluation_name=name,
    )


def _check(config: DataConfig) -> int:
    size = DEFAULT_SIZE if config.size is None else config.size
    if size < 1:
        raise UserError(f"data.size must be above 0, not {size}")
    if config.resize < DEFAULT_SIZE:
        raise UserError(
            f"data.resize is the shorter side before a centre crop of {DEFAULT_SIZE} px "
            f"(in proportion for another data.size), so it can't be {config.resize}"
        )
    if not 0 < config.min_area <= 1:
        raise UserError(f"data.min_area is a share of an image, up to 1, not {config.min_area}")
    return size


def _evaluation_folder(tree: FileTree) -> str:
    there = tree.folders()
    for name in EVALUATION:
        if name in there:
            return name
    raise UserError(
        f"{tree.root} has no folder named {', '.join(EVALUATION[:-1])} or {EVALUATION[-1]}; "
        "data.holdout sets training images aside instead"
    )
