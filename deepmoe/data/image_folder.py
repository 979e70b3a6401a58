"""ImageNet's layout: `train/CLASS/*.jpeg` and `val/CLASS/*.jpeg`, in a folder or a zip file."""

import logging
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.augment import look_at, random_views
from deepmoe.data.color import random_jitter, random_lighting
from deepmoe.data.decode import DEFAULT_SIZE, decode_box, evaluation_box, random_box
from deepmoe.data.file_tree import FileTree
from deepmoe.data.info import IMAGENET_MEAN, IMAGENET_STD, DataInfo
from deepmoe.data.interface import DataSource
from deepmoe.data.loader import Shard
from deepmoe.data.split import Split, hold_out, some_of, tell_missing
from deepmoe.data.workers import WorkerLoader
from deepmoe.errors import UserError

LOG = logging.getLogger("deepmoe")
MOST_CALIBRATION = 4096
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".tif", ".tiff")
TRAIN = "train"
EVALUATION = ("val", "validation", "test")  # the first that there is


class PackedNames:
    """Names of files, in two pieces of memory however many they are.

    Worker processes would come to copy a list of a million strings, each on its own.
    """

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._bytes = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __getitem__(self, index: int) -> str:
        encoded = self._bytes[self._ends[index] : self._ends[index + 1]]
        return encoded.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class ImageFolderReader:
    """Reads the images of one split (a `SampleReader`).

    Attributes:
        tree: the files.
        files: their names.
        labels_N: int64.
        info: what the loaded images are.
        config: crops and augmentation.
    """

    tree: FileTree
    files: PackedNames
    labels_N: np.ndarray
    info: DataInfo
    config: DataConfig

    def __len__(self) -> int:
        return len(self.labels_N)

    def name(self, index: int) -> str:
        """The sample's file, for messages."""
        return self.files[index]

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """uint8 image_CHW and its label; cropped at random with `rng`, as for evaluation without.

        Raises:
            Unreadable: where the file can't be used.
        """
        content, size = self.tree.read(self.name(index)), self.info.size[0]
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
            images = look_at(images, random_views(len(images), 0, self.config.mirror, generator), 0)
            if self.config.color_jitter:
                images = random_jitter(images, self.config.color_jitter, generator)
            if self.config.lighting:
                images = images + random_lighting(len(images), self.config.lighting, generator)
        return self.info.normalise(images), labels


def list_images(tree: FileTree, split: str, classes: list[str]) -> tuple[list[str], np.ndarray]:
    """Names and labels of a split's images.

    Args:
        tree: the data set.
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
    names = tree.names(split)
    # Not those that lie outside of all classes.
    images = [n for n in names if n.lower().endswith(SUFFIXES) and n.count("/") > 1]
    if len(images) < len(names):
        LOG.warning(
            "%d of %d files in %s are passed over: they lie in no class, or have another ending "
            "than %s",
            *(len(names) - len(images), len(names), split, ", ".join(SUFFIXES)),
        )
    labels = np.array([label_of[name.split("/")[1]] for name in images], dtype=np.int64)
    there = set(labels.tolist())
    for folder in folders:
        if label_of[folder] not in there:
            raise UserError(f"{tree.root} has no images in {split}/{folder}")
    return images, labels


def open_image_folder(
    config: DataConfig,
    *,
    batch_size: int,
    seed: int,
    device: torch.device | str,
    shard: Shard,
    info: DataInfo | None = None,
) -> DataSource:
    """Opens a folder or zip file in ImageNet's layout; arguments as of `open_data`.

    Raises:
        UserError: where a folder is missing or empty, or an option can't be.
    """
    size = _check(config)
    tree = FileTree.open(config.root, TRAIN)
    classes = tree.folders(TRAIN)
    train = list_images(tree, TRAIN, classes)
    _check_classes(tree, classes)
    evaluation_name = "holdout" if config.holdout else _evaluation_folder(tree)
    if config.holdout:
        # So that recipes can be chosen without looking at the test set.
        kept, held = _spread(train[1], config.holdout)
        train, evaluation = _select(train, np.sort(kept)), _select(train, np.sort(held))
    else:
        evaluation = list_images(tree, evaluation_name, classes)
    tell_missing(classes, train[1], "training")
    tell_missing(classes, evaluation[1], "evaluation")
    mean, std = (info.mean, info.std) if info else (IMAGENET_MEAN, IMAGENET_STD)
    found = DataInfo(tuple(classes), (size, size), mean, std)

    def loader(files: list[str], labels: np.ndarray) -> WorkerLoader:
        return WorkerLoader(
            ImageFolderReader(tree, PackedNames(files), labels, found, config),
            batch_size,
            seed=seed,
            device=device,
            shard=shard,
            workers=config.workers,
            unreadable_limit=config.unreadable_limit,
        )

    # In order, training files are sorted by class: a budget is calibrated on some of every class.
    some = _spread(train[1], min(MOST_CALIBRATION, len(train[1]) // 2))[1]
    return DataSource(
        found,
        train=loader(*train),
        evaluation=loader(*evaluation),
        calibration=loader(*_select(train, some)),
        evaluation_name=evaluation_name,
    )


def _spread(labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of all but `count` images, and of these, which are spread over the classes."""
    positions = Split(torch.arange(len(labels)), torch.from_numpy(labels))
    rest, chosen = hold_out(positions, count)
    return rest.images.numpy(), chosen.images.numpy()


def _select(
    images: tuple[list[str], np.ndarray], positions: np.ndarray
) -> tuple[list[str], np.ndarray]:
    return [images[0][i] for i in positions], images[1][positions]


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


def _check_classes(tree: FileTree, classes: list[str]) -> None:
    if len(classes) < 2:
        raise UserError(f"{tree.root} has only one class ({classes[0]}): at least two are needed")
    alike = defaultdict(list)
    for name in classes:
        alike[unicodedata.normalize("NFKC", name).casefold()].append(name)
    pairs = [" and ".join(names) for names in alike.values() if len(names) > 1]
    if pairs:
        LOG.warning("some classes have nearly the same name: %s", some_of(pairs))


def _evaluation_folder(tree: FileTree) -> str:
    there = tree.folders()
    for name in EVALUATION:
        if name in there:
            return name
    raise UserError(
        f"{tree.root} has no folder named {', '.join(EVALUATION[:-1])} or {EVALUATION[-1]}; "
        "data.holdout sets training images aside instead"
    )
