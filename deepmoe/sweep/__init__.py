"""Many training runs from one file, several side by side; goes on where it was stopped."""

from deepmoe.sweep.grid import Grid, Run, read_grid
from deepmoe.sweep.result import result_path
from deepmoe.sweep.runner import sweep
from deepmoe.sweep.summary import summary

__all__ = ["Grid", "Run", "read_grid", "result_path", "summary", "sweep"]
