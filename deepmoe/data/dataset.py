"""A data set in memory, and the choice of one by name."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.cifar import read_cifar
from deepmoe.data.digits import DIGITS_SIZE, read_digits
from deepmoe.data.split import Split
from deepmoe.errors import UserError


@dataclass(frozen=True)
class ImageInfo:
    """What a trained model must know of its data to judge an image: goes into checkpoints."""

    class_names: tuple[str, ...]
    size: tuple[int, int]
    mean: tuple[float, ...]  # of each colour, in 0..1, over the training images
    std: tuple[float, ...]

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """uint8 images to float32 of zero mean and unit variance."""
        device = images_BCHW.device
        mean = torch.tensor(self.mean, device=device)[:, None, None] * 255
        std = torch.tensor(self.std, device=device)[:, None, None] * 255
        return (images_BCHW.float() - mean) / std


@dataclass(frozen=True)
class ImageData:
    """A classification data set: what to train on, what to evaluate on."""

    info: ImageInfo
    train: Split
    evaluation: Split  # the test set, or the held-out training images
    evaluation_name: str  # "test" or "holdout"


def load_data(config: DataConfig) -> ImageData:
    """Reads a data set into memory.

    With `holdout`, that many training images, spread evenly over the classes, take the place of
    the test set, so that recipes can be chosen without looking at it.
    """
    if config.name == "digits":
        train, test, names = read_digits(config.size or DIGITS_SIZE)
    else:
        if config.size not in (None, 32):
            raise UserError(f"{config.name} has images of 32 px; data.size can't be {config.size}")
        train, test, names = read_cifar(config.root, config.name)
    info = _measure(train, names)
    if not config.holdout:
        return ImageData(info, train, test, "test")
    train, held_out = _hold_out(train, config.holdout)
    return ImageData(info, train, held_out, "holdout")


def _measure(train: Split, names: tuple[str, ...]) -> ImageInfo:
    # In parts: a float copy of the whole data set would be needless.
    parts = [part.double() / 255 for part in train.images.split(4096)]
    pixels = train.images[:, 0].numel()
    mean = sum(part.sum(dim=(0, 2, 3)) for part in parts) / pixels
    square = sum(part.square().sum(dim=(0, 2, 3)) for part in parts) / pixels
    std = (square - mean.square()).clamp_min(1e-6).sqrt()
    size = (train.images.shape[2], train.images.shape[3])
    return ImageInfo(names, size, tuple(mean.tolist()), tuple(std.tolist()))


def _hold_out(train: Split, count: int) -> tuple[Split, Split]:
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
