"""Runs of seconds, and what they have noted."""

from pathlib import Path

from deepmoe.config import RunConfig
from deepmoe.training import FitResult, fit
from deepmoe.training.log import read_metrics


def run(config: RunConfig, out: Path, **options: bool) -> FitResult:
    return fit(config, out, quiet=True, **options)


def without_time(path: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(path)]
