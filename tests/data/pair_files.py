"""Small made-up sets of images with label maps."""

import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from deepmoe.config import DataConfig
from deepmoe.data import open_data

SIZE = (24, 40)


def write(root: Path, name: str, pixels: np.ndarray) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def write_pair(root: Path, split: str, stem: str, label: np.ndarray, seed: int = 0) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (*label.shape, 3))
    write(root, f"images/{split}/{stem}.png", image)
    write(root, f"labels/{split}/{stem}.png", label)


def write_coordinates(root: Path, size: tuple[int, int] = SIZE) -> None:
    """Every pixel's image and label say where it is: red its row, green its column."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    for split in ("train", "test"):
        write(
            root,
            f"images/{split}/a.png",
            np.stack([4 * rows, 4 * columns, np.zeros(size)], axis=-1),
        )
        write(root, f"labels/{split}/a.png", rows)
    (root / "classes.txt").write_text("\n".join(f"row {i}" for i in range(size[0])))


def zip_folder(folder: Path, target: Path, top: str = "") -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, f"{top}{path.relative_to(folder).as_posix()}")
        archive.writestr(f"__MACOSX/{top}images/train/a.png", b"junk")
    return target


def open_pairs(root: Path, batch_size: int = 1, **options):
    options = {"workers": 0, **options}
    config = DataConfig(name="segmentation-pairs", root=str(root), **options)
    return open_data(config, batch_size=batch_size)


def reader(root: Path, **options):
    return open_pairs(root, **options).train.reader


def write_pairs(root: Path) -> Path:
    """Three training and two test pairs of classes 0 to 4, with some void."""
    rng = np.random.default_rng(1)
    for i in range(5):
        label = rng.integers(0, 5, SIZE)
        label[:3] = 255
        write_pair(root, "train" if i < 3 else "test", f"image{i}", label, seed=i)
    return root
