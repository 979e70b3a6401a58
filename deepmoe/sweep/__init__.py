"""Many training runs from one file, several side by side; goes on where it was stopped."""

from deepmoe.sweep.grid import Grid, Run, read_grid
from deepmoe.sweep.runner import result_path, sweep
from deepmoe.sweep.summary import summary

__all__ = ["Grid", "Run", "read_grid", "result_path", "summary", "sweep"]
