"""The figures of a sweep's runs, side by side."""

import itertools
import statistics
from pathlib import Path
from typing import Any

from deepmoe.sweep.grid import Grid
from deepmoe.sweep.result import read_run_result, result_path

NOT_FIGURES = ("epoch", "stage")  # keys of a run's last metrics that the table leaves out


def summary(grid: Grid, results: Path) -> list[dict[str, Any]]:
    """One row for each group of runs: mean and sample deviation over the seeds that are done."""
    rows = []
    for group, members in itertools.groupby(grid.runs, key=lambda run: run.group):
        paths = [result_path(results, run) for run in members]
        done = [read_run_result(path) for path in paths if path.exists()]
        found = [{**result.last, "seconds": result.seconds} for result in done]
        row: dict[str, Any] = {"run": group, "seeds": len(found)}
        for key in found[0] if found else ():
            figures = [f for values in found if isinstance(f := values.get(key), int | float)]
            if key not in NOT_FIGURES and len(figures) == len(found):
                row[key] = statistics.fmean(figures)
                if len(figures) > 1:
                    row[f"{key}_deviation"] = statistics.stdev(figures)
        rows.append(row)
    return rows
