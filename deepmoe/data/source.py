"""A data set by name: what it is, and loaders to train and to evaluate with."""

import dataclasses
from collections.abc import Callable

import torch

from deepmoe.config import GIVEN, DataConfig
from deepmoe.data.cifar import read_cifar
from deepmoe.data.digits import DIGITS_SIZE, read_digits
from deepmoe.data.image_folder import open_image_folder
from deepmoe.data.info import DataInfo
from deepmoe.data.interface import DataSource
from deepmoe.data.loader import WHOLE, BatchLoader, Shard
from deepmoe.data.segmentation import open_segmentation
from deepmoe.data.split import Split, hold_out, tell_missing
from deepmoe.errors import UserError
from deepmoe.progress import progress


def open_data(
    config: DataConfig,
    *,
    batch_size: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    info: DataInfo | None = None,
    calibrate: bool = False,
) -> DataSource:
    """Opens the data set that a configuration names.

    Args:
        config: name, place and augmentation.
        batch_size: images a training batch, over all shards.
        seed: of shuffling and augmentation.
        device: where batches are made.
        shard: which part of every batch this process gets.
        info: of a trained model: its normalisation is used, and its classes must be the data's.
        calibrate: set training images aside to calibrate on, from data that fits into memory:
            there, a network comes to know its training images too well. Others calibrate on those.

    Raises:
        UserError: where the data is missing, damaged or not what it should be.
    """
    if config.name == GIVEN:
        raise UserError(
            "the data was given as torch datasets, which no file can name: "
            "set data.name and data.root, or call fit or evaluate with datasets"
        )
    with progress(f"opening {config.name}"):
        if config.name in _OPEN_FILES:
            source = _OPEN_FILES[config.name](
                config, batch_size=batch_size, seed=seed, device=device, shard=shard, info=info
            )
        else:
            source = _open_in_memory(config, batch_size, seed, device, shard, info, calibrate)
    if info is not None:
        _check_classes(info, source.info, config.name)
    return source


def _check_classes(model: DataInfo, data: DataInfo, name: str) -> None:
    if model.task != data.task:
        raise UserError(f"the model was trained for {model.task}, but {name} is for {data.task}")
    if model.classes != data.classes:
        raise UserError(
            f"the model knows {model.classes} classes, but the data ({name}) has {data.classes}"
        )
    for label, (known, found) in enumerate(zip(model.class_names, data.class_names, strict=True)):
        if known != found:
            raise UserError(
                f"class {label} (of 0 to {model.classes - 1}) is {known} to the model, "
                f"but {found} in the data ({name})"
            )


def _open_in_memory(
    config: DataConfig,
    batch_size: int,
    seed: int,
    device: torch.device | str,
    shard: Shard,
    info: DataInfo | None,
    calibrate: bool,
) -> DataSource:
    if config.name == "digits":
        train, test, names = read_digits(DIGITS_SIZE if config.size is None else config.size)
    else:
        if config.size not in (None, 32):
            raise UserError(f"{config.name} has images of 32 px; data.size can't be {config.size}")
        train, test, names = read_cifar(config.root, config.name)
    measured = _measure(train, names)
    if info is not None:
        measured = dataclasses.replace(measured, mean=info.mean, std=info.std)
    evaluation, evaluation_name = test, "test"
    if config.holdout:
        # So that recipes can be chosen without looking at the test set.
        (train, evaluation), evaluation_name = hold_out(train, config.holdout), "holdout"
    calibration = train
    if calibrate:
        train, calibration = hold_out(train, min(MOST_CALIBRATION, len(train) // 8))

    for labels, what in ((train.labels, "training"), (evaluation.labels, "evaluation")):
        tell_missing(names, labels.numpy(), what)

    def in_order(split: Split, part: Shard) -> BatchLoader:
        return BatchLoader(split, measured, EVALUATION_BATCH, device=device, shard=part)

    return DataSource(
        info=measured,
        train=BatchLoader(
            train, measured, batch_size, augment=config, seed=seed, device=device, shard=shard
        ),
        evaluation=in_order(evaluation, shard),
        calibration=in_order(calibration, WHOLE),
        evaluation_name=evaluation_name,
    )


EVALUATION_BATCH = 500
MOST_CALIBRATION = 1000
_OPEN_FILES: dict[str, Callable[..., DataSource]] = {
    "image-folder": open_image_folder,
    "segmentation-pairs": open_segmentation,
    "cityscapes": open_segmentation,
}


def _measure(train: Split, names: tuple[str, ...]) -> DataInfo:
    # In parts: a float copy of the whole data set would be needless.
    parts = [part.double() / 255 for part in train.images.split(4096)]
    pixels = train.images[:, 0].numel()
    mean = torch.stack([part.sum(dim=(0, 2, 3)) for part in parts]).sum(dim=0) / pixels
    square = torch.stack([part.square().sum(dim=(0, 2, 3)) for part in parts]).sum(dim=0) / pixels
    std = (square - mean.square()).clamp_min(1e-6).sqrt()
    size = (train.images.shape[2], train.images.shape[3])
    return DataInfo(names, size, tuple(mean.tolist()), tuple(std.tolist()))
