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
    return {"run": "li-50", "seeds": len(accuracies), "accuracy_deviation": deviation, **means}


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
