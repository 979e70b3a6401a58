"""Many training runs from one file, several side by side; goes on where it was stopped."""

from deepmoe.sweep.grid import Grid, Run, grid_name, read_grid
from deepmoe.sweep.results import RESULTS_NAME, RunResult, read_results
from deepmoe.sweep.runner import check_settings, sweep, to_train
from deepmoe.sweep.summary import summary

__all__ = [
    "RESULTS_NAME",
    "Grid",
    "Run",
    "RunResult",
    "check_settings",
    "grid_name",
    "read_grid",
    "read_results",
    "summary",
    "sweep",
    "to_train",
]
