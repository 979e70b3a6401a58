"""Tables of several files of a comparison: means and deviations over the seeds of all."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import compare_tables  # noqa: E402


def line_of(figures: dict[str, np.ndarray]) -> dict[str, Any]:
    """The line of a file, of so many seeds."""
    accuracies = figures["accuracy"]
    deviation = float(accuracies.std(ddof=1)) if len(accuracies) > 1 else None
    means = {key: float(values.mean()) for key, values in figures.items()}
    plain = {"run": "li-50", "dynamic": False, "latency_ratio": None}
    return {**plain, "seeds": len(accuracies), "accuracy_deviation": deviation, **means}


@pytest.mark.parametrize("seeds", [(1, 1, 1), (1, 2), (2, 1), (1, 1)])
def test_seeds_of_all_files_are_pooled(
    seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    files = [{key: rng.random(n) for key in compare_tables.MEANS} for n in seeds]
    files[0]["exited"] *= 0  # a figure as good as any other
    parts = [{"values": [line_of(figures)]} for figures in files]
    monkeypatch.setattr(compare_tables, "parts", lambda folder: parts)
    (line,) = compare_tables.pooled("any")
    together = {key: np.concatenate([f[key] for f in files]) for key in compare_tables.MEANS}
    assert line == pytest.approx(line_of(together))


def test_what_is_known_of_some_files_is_not_made_up_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = line_of({key: np.ones(1) for key in compare_tables.MEANS})
    parts = [{"values": [known]}, {"values": [{**known, "prune_seconds": None}]}]
    monkeypatch.setattr(compare_tables, "parts", lambda folder: parts)
    (line,) = compare_tables.pooled("any")
    assert line["seeds"] == 2 and line["prune_seconds"] == 1


def test_latency_is_taken_from_whichever_file_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = line_of({key: np.ones(3) for key in compare_tables.MEANS})
    # A seed more than are asked for, of another accuracy: only its latency counts.
    timed = {**known, "accuracy": 0.0, "seeds": 1, "latency_ratio": 0.5}
    monkeypatch.setattr(compare_tables, "parts", lambda folder: [{"values": [known, timed]}])
    (line,) = compare_tables.pooled("any")
    assert line == {**known, "latency_ratio": 0.5}


@pytest.mark.parametrize(
    ("other", "latency"),
    [({}, 0.5), ({"parameters": 2.0}, None), ({"macs": 2.0}, None), ({"dynamic": True}, None)],
)
def test_networks_of_one_shape_have_one_latency(
    other: dict[str, Any], latency: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = line_of({key: np.ones(1) for key in compare_tables.MEANS})
    lines = [{**known, "latency_ratio": 0.5}, {**known, "run": "thin-50", **other}]
    monkeypatch.setattr(compare_tables, "parts", lambda folder: [{"values": lines}])
    assert [line["latency_ratio"] for line in compare_tables.pooled("any")] == [0.5, latency]
