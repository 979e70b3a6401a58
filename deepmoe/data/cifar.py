"""CIFAR-10 and CIFAR-100 in both public layouts: python pickles and binary records."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmoe.data.plain_pickle import load_plain_pickle
from deepmoe.data.reading import Unreadable, read_file
from deepmoe.data.split import Split
from deepmoe.errors import UserError

PIXELS = 3 * 32 * 32
MOST_BYTES = 2**29  # of a file; the largest, CIFAR-100's training images, has 2**28 at the most
MOST_BYTES_OF_NAMES = 2**20


@dataclass(frozen=True)
class CifarArchive:
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


ARCHIVES = {
    "cifar10": (
        CifarArchive(
            "cifar-10-batches-py",
            train=tuple(f"data_batch_{i}" for i in range(1, 6)),
            test=("test_batch",),
            names_file="batches.meta",
            names_key="label_names",
            labels_key="labels",
        ),
        CifarArchive(
            "cifar-10-batches-bin",
            train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            test=("test_batch.bin",),
            names_file="batches.meta.txt",
        ),
    ),
    "cifar100": (
        CifarArchive(
            "cifar-100-python",
            train=("train",),
            test=("test",),
            names_file="meta",
            names_key="fine_label_names",
            labels_key="fine_labels",
        ),
        CifarArchive(
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
    folder, archive = _find(Path(os.path.expanduser(root)), name)
    files = (archive.names_file, *archive.train, *archive.test)
    return _read(folder, archive, CLASSES[name], tuple(_version(folder / file) for file in files))


@functools.lru_cache(maxsize=1)  # runs of one process, one after the other, are mostly of one set
def _read(
    folder: Path, archive: CifarArchive, classes: int, _versions: tuple[tuple[int, ...] | None, ...]
) -> tuple[Split, Split, tuple[str, ...]]:
    names = _read_names(folder / archive.names_file, archive, classes)
    train = _read_files([folder / file for file in archive.train], archive, classes)
    test = _read_files([folder / file for file in archive.test], archive, classes)
    return train, test, names


def _version(path: Path) -> tuple[int, ...] | None:
    """What changes when a file does; `None` where that can't be told, as reading it will."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _find(root: Path, name: str) -> tuple[Path, CifarArchive]:
    if not os.path.isdir(root):
        what = "is not a folder" if os.path.exists(root) else "does not exist"
        raise UserError(f"data folder {root} {what}; set data.root to where {name} is")
    for archive in ARCHIVES[name]:
        for folder in (root / archive.folder, root):
            wanted = (folder / archive.train[0], folder / archive.names_file)
            if all(map(os.path.exists, wanted)):
                return folder, archive
    folders = " or ".join(archive.folder for archive in ARCHIVES[name])
    raise UserError(f"data folder {root} has no {name}: looked for {folders}")


def _read_files(paths: list[Path], archive: CifarArchive, classes: int) -> Split:
    read = _read_records if archive.binary else _read_batch
    parts = [read(path, archive) for path in paths]
    for path, (_, labels) in zip(paths, parts, strict=True):
        if labels.min() < 0 or labels.max() >= classes:
            raise UserError(
                f"{path} has labels from {labels.min()} to {labels.max()}, not 0 to {classes - 1}"
            )
    _check_counts(paths, [len(labels) for _, labels in parts], archive)
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in parts])
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _check_counts(paths: list[Path], counts: list[int], archive: CifarArchive) -> None:
    """Finds files that were cut between two images, which nothing inside of them can tell."""
    whole = OFFICIAL_COUNTS[len(archive.train), paths[0].name in archive.train]
    for path, count in zip(paths, counts, strict=True):
        # Small made-up archives are welcome; what is larger than they ever are must be complete.
        expected = whole if max(counts) > SMALL_ARCHIVE else max(counts)
        if count != expected:
            raise UserError(f"{path} is truncated: it has {count} images instead of {expected}")


def _read_records(path: Path, archive: CifarArchive) -> tuple[np.ndarray, np.ndarray]:
    content = _read_bytes(path)
    record = archive.label_bytes + PIXELS
    if not content or len(content) % record:
        raise UserError(
            f"{path} is truncated or not a CIFAR file: {len(content)} bytes "
            f"are not a whole number of records of {record}"
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = rows[:, archive.label_bytes - 1].astype(np.int64)
    return rows[:, archive.label_bytes :].copy(), labels


def _read_batch(path: Path, archive: CifarArchive) -> tuple[np.ndarray, np.ndarray]:
    batch = load_plain_pickle(path, _read_bytes(path))
    images, labels = batch.get("data"), batch.get(archive.labels_key)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise UserError(f"{path} is not a CIFAR file: it has no uint8 array named data")
    if images.ndim != 2 or images.shape[1] != PIXELS:
        raise UserError(f"{path} has data of shape {images.shape}, not (images, {PIXELS})")
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        labels = np.array(labels, dtype=np.int64)
    if not isinstance(labels, np.ndarray) or labels.ndim != 1:
        raise UserError(f"{path} is not a CIFAR file: it has no numbers named {archive.labels_key}")
    if len(labels) != len(images):
        raise UserError(f"{path} has {len(images)} images but {len(labels)} labels")
    return images, labels.astype(np.int64)


def _read_names(path: Path, archive: CifarArchive, classes: int) -> tuple[str, ...]:
    content = _read_bytes(path, MOST_BYTES_OF_NAMES)
    if archive.binary:
        names: Any = [line.strip() for line in content.splitlines() if line.strip()]
    else:
        names = load_plain_pickle(path, content).get(archive.names_key)
    if not isinstance(names, list) or not all(isinstance(n, str | bytes) for n in names):
        raise UserError(f"{path} is not a CIFAR file: it has no list of class names")
    if len(names) != classes:
        raise UserError(f"{path} names {len(names)} classes, not {classes}")
    texts = tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in names)
    if len(set(texts)) < classes or not all(text and text.isprintable() for text in texts):
        raise UserError(f"{path} does not give each class a name of its own")
    return texts


def _read_bytes(path: Path, limit: int = MOST_BYTES) -> bytes:
    try:
        return read_file(path, limit)
    except Unreadable as error:
        raise UserError(f"cannot read {path}: {error}") from error
