"""The measurement of the input reads what training reads, and compares round by round."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import input_speed


def test_every_way_gets_the_same_images_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_speed, "BATCH", 4)
    monkeypatch.setattr(input_speed, "ROUNDS", 2)
    seen: dict[str, list[list[int]]] = {"ours": [], "theirs": []}
    speeds = input_speed.take_turns({k: v.append for k, v in seen.items()}, 5, seconds=0)
    assert seen["ours"] == seen["theirs"] == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 0, 1, 2]]
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in speeds.values())


def test_ratios_are_taken_round_by_round() -> None:
    speeds = {
        "ours_decode": [10.0, 20.0, 90.0],
        "ours_total": [5.0, 10.0, 40.0],
        "torchvision": [2.0, 10.0, 10.0],
    }
    figures = input_speed.summary(speeds)
    assert figures["ours_decode_per_s"] == 20 and figures["torchvision_per_s"] == 10
    assert figures["ratio_decode"] == 5 and figures["ratio_total"] == 2.5


def test_our_way_prepares_copies_of_a_data_set_without_its_unreadable_files(tmp_path: Path) -> None:
    for number in range(7):
        folder = tmp_path / "data" / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((40, 50, 3), number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "data" / "train" / "class0" / "0.png").write_bytes(b"")
    copies = tmp_path / "copies"
    assert input_speed.copy_files(str(tmp_path / "data"), str(copies), count=100) == 6
    input_speed.our_way(str(copies), 32, finish=True)(list(range(6)))
