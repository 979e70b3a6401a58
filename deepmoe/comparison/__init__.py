"""One fair harness: the same start, cost, schedule and teachers for every method, in one table."""

from deepmoe.comparison.asked import Asked, Row, comparison_grid, rows_of
from deepmoe.comparison.opening import open_comparison
from deepmoe.comparison.run import Comparison, run_comparison

__all__ = [
    "Asked",
    "Comparison",
    "Row",
    "comparison_grid",
    "open_comparison",
    "rows_of",
    "run_comparison",
]
