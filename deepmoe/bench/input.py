"""How many images a second one core prepares for training: ours beside torchvision's way."""

import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmoe.config import DataConfig
from deepmoe.data.file_tree import FileTree
from deepmoe.data.image_folder import TRAIN, ImageFolderReader, PackedNames, list_images
from deepmoe.data.info import IMAGENET_MEAN, IMAGENET_STD, DataInfo
from deepmoe.data.reading import Unreadable
from deepmoe.errors import UserError

BATCH = 64
ROUNDS = 5
JITTER = 0.4

Prepare = Callable[[list[int]], None]
"""Prepares the images at these positions, and lets them go."""


def bench_input(
    root: str | Path | None = None,
    images: int = 400,
    size: int = 224,
    seconds: float = 30.0,
    threads: int = 1,
) -> dict[str, Any]:
    """Measures the training input of image folders, in this process alone.

    Both ways read the same files and take turns, so that a busy machine slows both.

    Args:
        root: a data set in ImageNet's layout, as folder or zip file; `None` makes JPEG files of
            ImageNet's usual size.
        images: how many of its training images to use; unreadable ones are left out.
        size: pixels a side of the random crop.
        seconds: for everything that is measured; every way gets at least one batch a round.
        threads: of torch's operations on batches.

    Returns:
        Images a second: `ours_decode_per_s` (what our workers do: read, decode, crop),
        `ours_total_per_s` (the same and the batched rest on the CPU), `torchvision_per_s` (all of
        it, image by image), and our two figures' ratios to the last: medians over rounds. Without
        torchvision its figures are `None`.
    """
    if images < 1:
        raise UserError(f"the input can't be measured with {images} images")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            count = _make_files(folder, images) if root is None else _copy(root, folder, images)
            ways = {"ours_decode": _our_way(folder, size, finish=False)}
            ways["ours_total"] = _our_way(folder, size, finish=True)
            torchvision_way, version = _torchvision_way(folder, size)
            if torchvision_way is not None:
                ways["torchvision"] = torchvision_way
            speeds = _take_turns(ways, count, seconds)
    finally:
        torch.set_num_threads(threads_before)
    return {"images": count, "size": size} | _summary(speeds) | {"torchvision": version}


def _summary(speeds: dict[str, list[float]]) -> dict[str, float | None]:
    def ratio(name: str) -> float | None:
        if "torchvision" not in speeds:
            return None
        # Of each round, because the machine may be slower in one than in another.
        pairs = zip(speeds[name], speeds["torchvision"], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    medians = {name: statistics.median(speeds[name]) for name in speeds}
    return {
        "ours_decode_per_s": medians["ours_decode"],
        "ours_total_per_s": medians["ours_total"],
        "torchvision_per_s": medians.get("torchvision"),
        "ratio_decode": ratio("ours_decode"),
        "ratio_total": ratio("ours_total"),
    }


def _take_turns(ways: dict[str, Prepare], count: int, seconds: float) -> dict[str, list[float]]:
    """Images a second of every way in every round."""
    each = seconds / (ROUNDS * len(ways))
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for prepare in ways.values():
        prepare([i % count for i in range(BATCH)])  # the first time is never like the others
    position = 0
    for _ in range(ROUNDS):
        for name, prepare in ways.items():
            done, elapsed, at, start = 0, 0.0, position, time.perf_counter()
            while not done or elapsed < each:
                prepare([(at + i) % count for i in range(BATCH)])
                done, at, elapsed = done + BATCH, at + BATCH, time.perf_counter() - start
            speeds[name].append(done / elapsed)
        position += BATCH
    return speeds


def _our_way(folder: str, size: int, *, finish: bool) -> Prepare:
    # Without lighting, which torchvision doesn't have.
    config = DataConfig(name="image-folder", color_jitter=JITTER, lighting=0.0)
    reader = _training_reader(folder, size, config)
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)

    def prepare(positions: list[int]) -> None:
        samples = [reader.read(position, rng) for position in positions]
        if finish:
            images, labels = zip(*samples, strict=True)
            reader.finish(torch.stack(images), torch.stack(labels), generator)

    return prepare


def _torchvision_way(folder: str, size: int) -> tuple[Prepare | None, str | None]:
    try:
        torchvision = import_module("torchvision")
    except (ImportError, RuntimeError):  # RuntimeError: made for another version of torch
        return None, None
    datasets, transforms = torchvision.datasets, torchvision.transforms
    steps = [
        transforms.RandomResizedCrop(size),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(JITTER, JITTER, JITTER),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    files = datasets.ImageFolder(str(Path(folder, TRAIN)), transforms.Compose(steps))

    def prepare(positions: list[int]) -> None:
        for position in positions:
            files[position]

    return prepare, str(torchvision.__version__)


def _training_reader(root: str | Path, size: int, config: DataConfig) -> ImageFolderReader:
    tree = FileTree.open(root, TRAIN)
    files, labels = list_images(tree, TRAIN, tree.folders(TRAIN))
    # Names play no part; of the classes themselves, a few images may have only one.
    info = DataInfo(("any", "other"), (size, size), IMAGENET_MEAN, IMAGENET_STD)
    return ImageFolderReader(tree, PackedNames(files), labels, info, config)


def _make_files(folder: str, count: int) -> int:
    """500x375 JPEG files of about 100 kB, much like ImageNet's: soft shapes, fine grain."""
    from PIL import Image

    rng = np.random.default_rng(0)
    place = Path(folder, TRAIN, "made-up")
    place.mkdir(parents=True)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(256, size=(6, 8, 3), dtype=np.uint8))
        soft = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=float)
        grainy = (soft + rng.normal(scale=8, size=(375, 500, 1))).clip(0, 255).astype(np.uint8)
        Image.fromarray(grainy).save(place / f"{i:05}.jpeg", quality=95)
    return count


def _copy(root: str | Path, folder: str, count: int) -> int:
    """Copies training images, evenly chosen: both ways then read plain files of one place."""
    found = _training_reader(root, 1, DataConfig())
    wanted = min(count, len(found))
    copied = 0
    for index in (i * len(found) // wanted for i in range(wanted)):
        try:
            found.read(index, None)
        except Unreadable:
            continue
        target = Path(folder, found.name(index))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(found.tree.read(found.name(index)))
        copied += 1
    if not copied:
        raise UserError(f"none of {wanted} training images of {root} could be read")
    return copied
