"""How many images a second one core prepares for training: our way beside torchvision's.

    python benchmarks/input_speed.py [ROOT]

ROOT is a data set in ImageNet's layout, a folder or a zip file; without it, JPEG files of
ImageNet's usual size are made. Both ways read the same files and take turns, so that a busy machine
slows both. Needs torchvision, which deepmoe itself does not.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from deepmoe.config import DataConfig
from deepmoe.data.file_tree import FileTree
from deepmoe.data.image_folder import TRAIN, ImageFolderReader, PackedNames, list_images
from deepmoe.data.info import IMAGENET_MEAN, IMAGENET_STD, DataInfo
from deepmoe.data.reading import Unreadable
from deepmoe.results import write_result

BATCH = 64
ROUNDS = 5
JITTER = 0.4
SIZE = 224  # pixels a side of the random crop
SECONDS = 30.0  # for everything that is measured
OUT = Path(__file__).with_name("input_speed.json")

Prepare = Callable[[list[int]], None]
"""Prepares the images at these positions, and lets them go."""


def our_way(folder: str, size: int, *, finish: bool) -> Prepare:
    """What our workers do: read, decode, crop; with `finish`, the batched rest on the CPU too."""
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


def torchvision_way(folder: str, size: int) -> Prepare:
    """All of it, image by image."""
    from torchvision import datasets, transforms

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

    return prepare


def take_turns(ways: dict[str, Prepare], count: int, seconds: float) -> dict[str, list[float]]:
    """Images a second of every way in every round; at least one batch each."""
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


def summary(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Medians over rounds: images a second, and our ratios to torchvision."""

    def ratio(name: str) -> float:
        # Of each round, because the machine may be slower in one than in another.
        pairs = zip(speeds[name], speeds["torchvision"], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    return {
        **{f"{name}_per_s": statistics.median(found) for name, found in speeds.items()},
        "ratio_decode": ratio("ours_decode"),
        "ratio_total": ratio("ours_total"),
    }


def make_files(folder: str, count: int) -> int:
    """500x375 JPEG files of about 100 kB, much like ImageNet's: soft shapes, fine grain."""
    rng = np.random.default_rng(0)
    place = Path(folder, TRAIN, "made-up")
    place.mkdir(parents=True)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(256, size=(6, 8, 3), dtype=np.uint8))
        soft = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=float)
        grainy = (soft + rng.normal(scale=8, size=(375, 500, 1))).clip(0, 255).astype(np.uint8)
        Image.fromarray(grainy).save(place / f"{i:05}.jpeg", quality=95)
    return count


def copy_files(root: str, folder: str, count: int) -> int:
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
    return copied


def measure(root: str | None, images: int) -> dict[str, Any]:
    """Everything, in this process and on one thread."""
    import torchvision

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        count = make_files(folder, images) if root is None else copy_files(root, folder, images)
        ways = {
            "ours_decode": our_way(folder, SIZE, finish=False),
            "ours_total": our_way(folder, SIZE, finish=True),
            "torchvision": torchvision_way(folder, SIZE),
        }
        speeds = take_turns(ways, count, SECONDS)
    return {
        "images": count,
        "size": SIZE,
        **summary(speeds),
        "torchvision": str(torchvision.__version__),
    }


def _training_reader(root: str, size: int, config: DataConfig) -> ImageFolderReader:
    tree = FileTree.open(root, TRAIN)
    files, labels = list_images(tree, TRAIN, tree.folders(TRAIN))
    # Names play no part; of the classes themselves, a few images may have only one.
    info = DataInfo(("any", "other"), (size, size), IMAGENET_MEAN, IMAGENET_STD)
    return ImageFolderReader(tree, PackedNames(files), labels, info, config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", nargs="?")
    parser.add_argument("--images", type=int, default=400)
    asked = parser.parse_args()
    given = "" if asked.root is None else f" {Path(asked.root).name}"
    command = f"python benchmarks/input_speed.py{given} --images {asked.images}"
    values = measure(asked.root, asked.images)
    write_result(OUT, values, command=command, seed=0, device="cpu")
    print(values)
