"""The measurement of the input runs, and says what it measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepmoe.bench import input as bench
from deepmoe.bench.input import bench_input
from deepmoe.errors import UserError

KEYS = {
    "images",
    "size",
    "ours_decode_per_s",
    "ours_total_per_s",
    "torchvision_per_s",
    "ratio_decode",
    "ratio_total",
    "torchvision",
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BATCH", 4)
    monkeypatch.setattr(bench, "ROUNDS", 2)


def check(figures: dict, images: int) -> None:
    assert set(figures) == KEYS
    assert (figures["images"], figures["size"]) == (images, 32)
    assert figures["ours_decode_per_s"] > 0 and figures["ours_total_per_s"] > 0
    theirs = [figures[key] for key in ("torchvision_per_s", "ratio_decode", "ratio_total")]
    if figures["torchvision"] is None:
        assert theirs == [None] * 3
    else:
        assert min(theirs) > 0
    json.dumps(figures)


def test_measures_images_of_its_own_making() -> None:
    threads = torch.get_num_threads()
    check(bench_input(images=5, size=32, seconds=0), images=5)
    assert torch.get_num_threads() == threads


def test_measures_a_given_data_set_and_no_more_images_than_there_are(tmp_path: Path) -> None:
    for number in range(7):
        folder = tmp_path / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((40, 50, 3), number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    check(bench_input(tmp_path, images=3, size=32, seconds=0), images=3)
    check(bench_input(tmp_path, images=100, size=32, seconds=0), images=7)
    (tmp_path / "train" / "class0" / "0.png").write_bytes(b"")
    check(bench_input(tmp_path, images=100, size=32, seconds=0), images=6)


def test_ratios_are_taken_round_by_round() -> None:
    speeds = {
        "ours_decode": [10.0, 20.0, 90.0],
        "ours_total": [5.0, 10.0, 40.0],
        "torchvision": [2.0, 10.0, 10.0],
    }
    figures = bench._summary(speeds)
    assert figures["ours_decode_per_s"] == 20 and figures["torchvision_per_s"] == 10
    assert figures["ratio_decode"] == 5 and figures["ratio_total"] == 2.5


def test_no_images_are_a_mistake() -> None:
    with pytest.raises(UserError, match="0 images"):
        bench_input(images=0)
