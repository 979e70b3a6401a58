"""Small made-up CIFAR archives in all four public layouts."""

import pickle
from pathlib import Path

import numpy as np

PIXELS = 3072


def _made_up(rng: np.random.Generator, count: int, classes: int) -> tuple[np.ndarray, list[int]]:
    images = rng.integers(0, 256, (count, PIXELS), dtype=np.uint8)
    return images, [int(i % classes) for i in range(count)]


def _names(classes: int) -> list[str]:
    return [f"class{i}" for i in range(classes)]


def write_python(root: Path, name: str, per_file: int = 20) -> Path:
    """Writes pickles as Python 2 would have: byte strings and protocol 2."""
    rng = np.random.default_rng(0)
    if name == "cifar10":
        folder, classes, labels_key, names_key = "cifar-10-batches-py", 10, "labels", "label_names"
        files, meta = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], "batches.meta"
    else:
        folder, classes, labels_key = "cifar-100-python", 100, "fine_labels"
        names_key, files, meta = "fine_label_names", ["train", "test"], "meta"
    target = root / folder
    target.mkdir(parents=True)
    for file in files:
        images, labels = _made_up(rng, per_file, classes)
        batch = {"data": images, labels_key: labels, "filenames": ["x.png"] * per_file}
        (target / file).write_bytes(pickle.dumps(batch, protocol=2))
    (target / meta).write_bytes(pickle.dumps({names_key: _names(classes)}, protocol=2))
    return target


def write_binary(root: Path, name: str, per_file: int = 20) -> Path:
    """Writes the same made-up images as binary records."""
    rng = np.random.default_rng(0)
    if name == "cifar10":
        folder, classes, names = "cifar-10-batches-bin", 10, "batches.meta.txt"
        files = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    else:
        folder, classes, names = "cifar-100-binary", 100, "fine_label_names.txt"
        files = ["train.bin", "test.bin"]
    target = root / folder
    target.mkdir(parents=True)
    for file in files:
        images, labels = _made_up(rng, per_file, classes)
        columns = [np.array(labels, dtype=np.uint8)[:, None], images]
        if name == "cifar100":
            columns.insert(0, np.full((per_file, 1), 7, dtype=np.uint8))  # the coarse label
        (target / file).write_bytes(np.concatenate(columns, axis=1).tobytes())
    (target / names).write_text("\n".join(_names(classes)) + "\n\n")
    return target
