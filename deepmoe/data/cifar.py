"""CIFAR-10 and CIFAR-100 in both public layouts: python pickles and binary records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmoe.data.plain_pickle import load_plain_pickle
from deepmoe.data.split import Split
from deepmoe.errors import UserError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """Where one public archive keeps what."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names_file: str
    names_key: str = ""  # in the pickled names file
    labels_key: str = ""  # in a pickled batch
    label_bytes: int = 1  # before the pixels of a binary record; the last of them counts

    @property
    def binary(self) -> bool:
        return not self.labels_key


LAYOUTS = {
    "cifar10": (
        Layout(
            "cifar-10-batches-py",
            train=tuple(f"data_batch_{i}" for i in range(1, 6)),
            test=("test_batch",),
            names_file="batches.meta",
            names_key="label_names",
            labels_key="labels",
        ),
        Layout(
            "cifar-10-batches-bin",
            train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            test=("test_batch.bin",),
            names_file="batches.meta.txt",
        ),
    ),
    "cifar100": (
        Layout(
            "cifar-100-python",
            train=("train",),
            test=("test",),
            names_file="meta",
            names_key="fine_label_names",
            labels_key="fine_labels",
        ),
        Layout(
            "cifar-100-binary",
            train=("train.bin",),
            test=("test.bin",),
            names_file="fine_label_names.txt",
            label_bytes=2,
        ),
    ),
}
# Images a file, by the number of training files and whether the file is one of them.
OFFICIAL_COUNTS = {(5, True): 10_000, (5, False): 10_000, (1, True): 50_000, (1, False): 10_000}
SMALL_ARCHIVE = 1_000
CLASSES = {"cifar10": 10, "cifar100": 100}


def read_cifar(root: str | Path, name: str) -> tuple[Split, Split, tuple[str, ...]]:
    """Reads CIFAR-10 or CIFAR-100.

    Args:
        root: the unpacked archive's folder, or the folder that holds it.
        name: `cifar10` or `cifar100` (fine labels).

    Returns:
        Training split, test split and class names.

    Raises:
        UserError: where a file is missing, truncated or not what it should be.
    """
    folder, layout = _find(Path(root).expanduser(), name)
    classes = CLASSES[name]
    names = _read_names(folder / layout.names_file, layout, classes)
    train = _read_files([folder / file for file in layout.train], layout, classes)
    test = _read_files([folder / file for file in layout.test], layout, classes)
    return train, test, names


def _find(root: Path, name: str) -> tuple[Path, Layout]:
    if not root.is_dir():
        raise UserError(f"data folder {root} does not exist; set data.root to where {name} is")
    for layout in LAYOUTS[name]:
        for folder in (root / layout.folder, root):
            if (folder / layout.train[0]).is_file() and (folder / layout.names_file).is_file():
                return folder, layout
    wanted = " or ".join(layout.folder for layout in LAYOUTS[name])
    raise UserError(f"data folder {root} holds no {name}: looked for {wanted}")


def _read_files(paths: list[Path], layout: Layout, classes: int) -> Split:
    read = _read_records if layout.binary else _read_batch
    parts = [read(path, layout) for path in paths]
    for path, (_, labels) in zip(paths, parts, strict=True):
        if labels.min() < 0 or labels.max() >= classes:
            raise UserError(
                f"{path} has labels from {labels.min()} to {labels.max()}, not 0 to {classes - 1}"
            )
    _check_counts(paths, [len(labels) for _, labels in parts], layout)
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in parts])
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _check_counts(paths: list[Path], counts: list[int], layout: Layout) -> None:
    """Finds files that were cut between two images, which nothing inside of them can tell."""
    whole = OFFICIAL_COUNTS[len(layout.train), paths[0].name in layout.train]
    for path, count in zip(paths, counts, strict=True):
        # Small made-up archives are welcome; what is larger than they ever are must be complete.
        expected = whole if max(counts) > SMALL_ARCHIVE else max(counts)
        if count != expected:
            raise UserError(f"{path} is truncated: it has {count} images instead of {expected}")


def _read_records(path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    content = _read_bytes(path)
    record = layout.label_bytes + PIXELS
    if not content or len(content) % record:
        raise UserError(
            f"{path} is truncated or not a CIFAR file: {len(content)} bytes "
            f"are not a whole number of records of {record}"
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = rows[:, layout.label_bytes - 1].astype(np.int64)
    return rows[:, layout.label_bytes :].copy(), labels


def _read_batch(path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    batch = load_plain_pickle(path, _read_bytes(path))
    images, labels = batch.get("data"), batch.get(layout.labels_key)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise UserError(f"{path} is not a CIFAR file: it has no uint8 array named data")
    if images.ndim != 2 or images.shape[1] != PIXELS or not len(images):
        raise UserError(f"{path} has data of shape {images.shape}, not (images, {PIXELS})")
    numbers = np.asarray(labels, dtype=object if _ragged(labels) else None)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise UserError(f"{path} is not a CIFAR file: it has no numbers named {layout.labels_key}")
    if len(numbers) != len(images):
        raise UserError(f"{path} has {len(images)} images but {len(numbers)} labels")
    return images, numbers.astype(np.int64)


def _read_names(path: Path, layout: Layout, classes: int) -> tuple[str, ...]:
    if layout.binary:
        lines = _read_bytes(path).decode("utf-8", errors="replace").splitlines()
        names: Any = [line.strip() for line in lines if line.strip()]
    else:
        names = load_plain_pickle(path, _read_bytes(path)).get(layout.names_key)
    if not isinstance(names, list) or not all(isinstance(n, str | bytes) for n in names):
        raise UserError(f"{path} is not a CIFAR file: it has no list of class names")
    if len(names) != classes:
        raise UserError(f"{path} names {len(names)} classes, not {classes}")
    return tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in names)


def _ragged(labels: object) -> bool:
    return not isinstance(labels, np.ndarray) and not (
        isinstance(labels, list) and all(isinstance(label, int) for label in labels)
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
