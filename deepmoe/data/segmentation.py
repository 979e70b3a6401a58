"""Images with a label at every pixel: paired files in a folder or zip, and Cityscapes."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.info import IMAGENET_MEAN, IMAGENET_STD, MOST_PIXELS, DataInfo
from deepmoe.data.interface import DataSource
from deepmoe.data.loader import Shard
from deepmoe.data.reading import Unreadable
from deepmoe.data.segmentation_files import (
    LAYOUTS,
    VOID,
    Pair,
    PairedFiles,
    read_colours,
    read_ids,
)
from deepmoe.data.workers import WorkerLoader
from deepmoe.errors import UserError

# Of ImageNet, on which networks for segmentation are trained first.
MEAN_COLOUR = tuple(round(255 * mean) for mean in IMAGENET_MEAN)

EVALUATION_BATCH = 8
EVALUATION_PIXELS = 2**21  # in a batch, so that big images don't fill the device's memory


class SegmentationReader:
    """Reads pairs of image and label map (a `SampleReader`).

    Args:
        files: where the pairs lie.
        pairs: the samples.
        info: classes, mean and standard deviation.
        config: `scale`, `crop`, `shift` and `mirror` of training.
    """

    def __init__(
        self, files: PairedFiles, pairs: Sequence[Pair], info: DataInfo, config: DataConfig
    ) -> None:
        self.tree = files.tree
        self.pairs = tuple(pairs)
        self.info = info
        self.config = config
        self.classes_of_ids = files.layout.table()

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        """The image's file."""
        return self.pairs[index].image

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """uint8 image_CHW and int64 label_HW: scaled and cut with `rng`, whole without.

        Raises:
            Unreadable: where either file is damaged, or the two don't fit each other.
        """
        pair = self.pairs[index]
        image, label = read_colours(self.tree, pair.image), self._read_label(pair.label)
        if image.shape[:2] != label.shape:
            sizes = [f"{width}x{height}" for height, width in (image.shape[:2], label.shape)]
            raise Unreadable(f"image is {sizes[0]} px but its label map {sizes[1]}")
        if rng is not None:
            if label.size * self.config.scale[1] ** 2 > MOST_PIXELS:
                raise Unreadable("image: too many pixels, once it is scaled by data.scale")
            image, label = self._augment(image, label, rng)
        # Copied, since PIL's memory is read-only.
        image_CHW = torch.from_numpy(image.transpose(2, 0, 1).copy())
        return image_CHW, torch.from_numpy(label.astype(np.int64))

    def finish(
        self, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Mirrors each image and its labels at random with `generator`, and normalises."""
        if generator is not None and self.config.mirror:
            flip = torch.rand(len(images), generator=generator, device=images.device) < 0.5
            flip_B11 = flip[:, None, None]
            images = torch.where(flip_B11[:, None], images.flip(3), images)
            labels = torch.where(flip_B11, labels.flip(2), labels)
        return self.info.normalise(images), labels

    def _read_label(self, name: str) -> np.ndarray:
        label = self.classes_of_ids[read_ids(self.tree, name)]
        wrong = label[(label >= self.info.classes) & (label != VOID)]
        if wrong.size:  # would end the run inside the loss, on a GPU without a word why
            raise Unreadable(f"label id {wrong[0]} is beyond the {self.info.classes} classes")
        return label

    def _augment(
        self, image: np.ndarray, label: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        factor = rng.uniform(*self.config.scale)
        height, width = (max(1, round(side * factor)) for side in label.shape)
        crop_height, crop_width = self.config.crop or label.shape
        top = _random_start(height, crop_height, self.config.shift, rng)
        left = _random_start(width, crop_width, self.config.shift, rng)
        scaled = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
        scaled_label = Image.fromarray(label).resize((width, height), Image.Resampling.NEAREST)
        # Pasting cuts off what reaches beyond the canvas, and leaves it as it is elsewhere.
        canvas = Image.new("RGB", (crop_width, crop_height), MEAN_COLOUR)
        canvas.paste(scaled, (-left, -top))
        label_canvas = Image.new("L", (crop_width, crop_height), VOID)
        label_canvas.paste(scaled_label, (-left, -top))
        return np.asarray(canvas), np.asarray(label_canvas)


def open_segmentation(
    config: DataConfig,
    *,
    batch_size: int,
    seed: int,
    device: torch.device | str,
    shard: Shard,
    info: DataInfo | None = None,
) -> DataSource:
    """Opens `segmentation-pairs` or `cityscapes`; arguments as for `open_data`."""
    if config.crop and math.prod(config.crop) > MOST_PIXELS:
        raise UserError(f"data.crop has too many pixels: {config.crop[0]} x {config.crop[1]}")
    files = PairedFiles.open(config.root, LAYOUTS[config.name])
    train = files.pairs("train")
    if not train:
        raise UserError(f"{config.root} has no images in {files.layout.images}/train")
    names = files.class_names(train)
    train, evaluation, evaluation_name = _split(files, train, config.holdout)
    for pairs in (train, evaluation):
        files.check_labels(pairs)
    if len(names) < 2:
        raise UserError(f"{config.root} has only one class ({names[0]}): at least two are needed")
    sizes = files.sizes(train)
    mean, std = (info.mean, info.std) if info else (IMAGENET_MEAN, IMAGENET_STD)
    found = DataInfo(names, config.crop or _common(sizes), mean, std, "segmentation")

    def loader(pairs: Sequence[Pair], sizes: set[tuple[int, int]]) -> WorkerLoader:
        return WorkerLoader(
            SegmentationReader(files, pairs, found, config),
            batch_size,
            seed=seed,
            device=device,
            shard=shard,
            workers=config.workers,
            unreadable_limit=config.unreadable_limit,
            evaluation_batch=_evaluation_batch(sizes),
        )

    training = loader(train, sizes)
    return DataSource(
        found, training, loader(evaluation, files.sizes(evaluation)), training, evaluation_name
    )


def _split(
    files: PairedFiles, train: list[Pair], holdout: int
) -> tuple[list[Pair], list[Pair], str]:
    """Training pairs, evaluation pairs, and what the latter are called."""
    # What is reported on must not be what recipes are chosen by.
    choose_by = ("val",) if files.layout.evaluation[0] != "val" else ()
    for split in choose_by if holdout else files.layout.evaluation:
        pairs = files.pairs(split)
        if pairs:
            return train, pairs, split
    if not holdout:
        wanted = " or ".join(f"{files.layout.images}/{split}" for split in files.layout.evaluation)
        raise UserError(
            f"{files.tree.root} has no images in {wanted}; "
            "data.holdout can set training images aside"
        )
    if holdout >= len(train):
        raise UserError(
            f"data.holdout is {holdout}, but there are only {len(train)} training images"
        )
    chosen = set(np.random.default_rng(0).permutation(len(train))[:holdout].tolist())
    rest = [pair for i, pair in enumerate(train) if i not in chosen]
    return rest, [train[i] for i in sorted(chosen)], "holdout"


def _common(sizes: set[tuple[int, int]]) -> tuple[int, int]:
    if len(sizes) > 1:
        raise UserError(
            f"training images differ in size (heights and widths from {min(sizes)} to "
            f"{max(sizes)}), so data.crop must be set"
        )
    (size,) = sizes  # not empty: a label map could be read
    return size


def _evaluation_batch(sizes: set[tuple[int, int]]) -> int:
    if len(sizes) != 1:  # whole images of several sizes make no batch
        return 1
    ((height, width),) = sizes
    return max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // (height * width)))


def _random_start(size: int, crop: int, shift: int, rng: np.random.Generator) -> int:
    """Where a crop begins: up to `shift` pixels outside, but over one pixel of the image."""
    spare = size - crop  # negative where the image is smaller than the crop
    first = max(min(0, spare) - shift, 1 - crop)
    last = min(max(0, spare) + shift, size - 1)
    return int(rng.integers(first, last + 1))
