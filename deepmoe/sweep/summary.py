"""The figures of a sweep's runs, side by side."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from deepmoe.sweep.grid import group_of
from deepmoe.sweep.results import RunResult

NOT_FIGURES = ("epoch", "stage")  # keys of a run's last metrics that the table leaves out


def summary(runs: Iterable[str], results: Mapping[str, RunResult]) -> list[dict[str, Any]]:
    """One row for each group of runs: mean and sample deviation over the seeds that are done.

    Args:
        runs: names, in the order of the rows.
        results: of those that are done, by name.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found = groups.setdefault(group_of(run), [])
        if run in results:
            found.append(results[run].figures)
    return [{"run": group, "seeds": len(found), **_means(found)} for group, found in groups.items()]


def _means(found: list[dict[str, Any]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for key in found[0] if found else ():
        figures = [f for values in found if isinstance(f := values.get(key), int | float)]
        if key not in NOT_FIGURES and len(figures) == len(found):
            row[key] = statistics.fmean(figures)
            if len(figures) > 1:
                row[f"{key}_deviation"] = statistics.stdev(figures)
    return row
