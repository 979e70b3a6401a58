"""Small data in the layouts of the paper's data sets, made of scikit-learn's digits."""

from pathlib import Path

import numpy as np
from PIL import Image

from deepmoe.data.cifar import ARCHIVES
from deepmoe.data.coarse_groups import CIFAR100
from deepmoe.data.digits import read_digits

SIDE = 32
CIFAR_FILE = {"cifar10": 20, "cifar100": 100}  # images of a training file; of tests, 100
TEST_IMAGES = 100
FOLDER_IMAGES = {"train": 8, "val": 3}  # of a class
PAIRS = {"train": 12, "test": 3}
FOLDERS = (*CIFAR_FILE, "imagenet", "camvid")
DONE = "made"  # a file that is written last
SOME = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def make_smoke_data(root: Path) -> None:
    """Writes all data sets below a folder, unless they are there already."""
    if (root / DONE).exists() and all((root / name).is_dir() for name in FOLDERS):
        return
    split, _, _ = read_digits(SIDE // 2)
    digits = [split.images[split.labels == digit, 0].numpy() for digit in range(10)]
    rng = np.random.default_rng(0)
    cifar10, cifar100, imagenet, camvid = FOLDERS
    for name, names in (
        (cifar10, SOME),
        (cifar100, tuple(sorted(" ".join(CIFAR100.values()).split()))),
    ):
        _write_cifar(root / name, name, names, digits, rng)
    _write_folders(root / imagenet, digits, rng)
    _write_pairs(root / camvid, digits, rng)
    (root / DONE).write_text("")


def _picture(number: int, digits: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Two digits side by side, on some noise; rows, columns, colours."""
    canvas = rng.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
    top = int(rng.integers(0, SIDE // 2 + 1))
    for place, digit in enumerate(divmod(number, 10)):
        ink = digits[digit][rng.integers(len(digits[digit]))]
        left = place * SIDE // 2
        part = canvas[top : top + SIDE // 2, left : left + SIDE // 2]
        np.maximum(part, ink[..., None], out=part)
    return canvas


def _write_cifar(
    root: Path,
    name: str,
    names: tuple[str, ...],
    digits: list[np.ndarray],
    rng: np.random.Generator,
) -> None:
    archive = next(a for a in ARCHIVES[name] if a.binary)
    folder = root / archive.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / archive.names_file).write_text("\n".join(names))
    for file in (*archive.train, *archive.test):
        images = CIFAR_FILE[name] if file in archive.train else TEST_IMAGES
        records = []
        for number in range(images):
            label = number % len(names)
            pixels = _picture(label, digits, rng).transpose(2, 0, 1).tobytes()
            records.append(bytes([label] * archive.label_bytes) + pixels)
        (folder / file).write_bytes(b"".join(records))


def _write_folders(root: Path, digits: list[np.ndarray], rng: np.random.Generator) -> None:
    for split, images in FOLDER_IMAGES.items():
        for label in range(10):
            folder = root / split / f"digit{label}"
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(images):
                picture = Image.fromarray(_picture(label, digits, rng))
                picture.save(folder / f"{number}.png")


def _write_pairs(root: Path, digits: list[np.ndarray], rng: np.random.Generator) -> None:
    """Scenes of two digits; a pixel's class is whether it is bright, grey or background."""
    for split, images in PAIRS.items():
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            scene = _picture(int(rng.integers(100)), digits, rng)
            label = np.digitize(scene[..., 0], (60, 160)).astype(np.uint8)
            Image.fromarray(scene).save(root / "images" / split / f"{number}.png")
            Image.fromarray(label).save(root / "labels" / split / f"{number}.png")
    (root / "classes.txt").write_text("background\ngrey\nbright\n")
