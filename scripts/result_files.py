"""Results as the documents read them."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepmoe.sweep import RESULTS_NAME, RunResult, read_results

ROOT = Path(__file__).parents[1]
BENCHMARKS, EXPERIMENTS = ROOT / "benchmarks", ROOT / "experiments"


def benchmark(name: str) -> dict[str, Any]:
    """A measurement of speed."""
    return _read(BENCHMARKS / f"{name}.json")


def experiment(name: str) -> dict[str, Any]:
    """A result that is not a sweep's, written EXPERIMENT/FILE."""
    return _read(EXPERIMENTS / f"{name}.json")


def shuffled(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Results of giving networks gates of other classes, by network and seed."""
    text = (EXPERIMENTS / name / "shuffling.jsonl").read_text(encoding="utf-8")
    results = [json.loads(line) for line in text.splitlines()]
    return {(result["values"]["network"], result["seed"]): result for result in results}


@functools.cache  # many tables read the same few sweeps
def runs_of(name: str) -> dict[str, RunResult]:
    """All runs of an experiment's sweep, those that its grid has no more among them."""
    return read_results(EXPERIMENTS / name / RESULTS_NAME)


def origin(*results: dict[str, Any]) -> str:
    """Where results are from."""

    def all_of(figures: Iterable[str]) -> str:
        return ", ".join(sorted(set(figures)))

    parts = [
        all_of(result["hardware"] for result in results),
        f"torch {all_of(result['versions']['torch'] for result in results)}",
        f"seed {all_of(str(result['seed']) for result in results)}",
        f"commit {all_of(result['commit'][:7] for result in results)}",
        all_of(f"`{r['command']}`" for r in results if r["command"].startswith("deepmoe")),
        all_of(result["note"] for result in results if "note" in result),
    ]
    return f"({'; '.join(part for part in parts if part)})"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
