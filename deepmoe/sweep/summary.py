"""The figures of a sweep's runs, side by side."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from deepmoe.sweep.grid import Grid
from deepmoe.sweep.runner import result_path

NOT_FIGURES = ("epoch", "stage")  # keys of a run's last metrics that the table leaves out


def summary(grid: Grid, results: Path) -> list[dict[str, Any]]:
    """One row for each group of runs: mean and sample deviation over the seeds that are done."""
    rows = []
    for group, members in itertools.groupby(grid.runs, key=lambda run: run.group):
        paths = [result_path(results, run) for run in members]
        found = [json.loads(p.read_text(encoding="utf-8"))["values"] for p in paths if p.exists()]
        row: dict[str, Any] = {"run": group, "seeds": len(found)}
        for key in found[0]["last"] if found else ():
            figures = [values["last"][key] for values in found]
            if key not in NOT_FIGURES and all(isinstance(f, int | float) for f in figures):
                row[key] = statistics.fmean(figures)
                if len(figures) > 1:
                    row[f"{key}_deviation"] = statistics.stdev(figures)
        rows.append(row)
    return rows
