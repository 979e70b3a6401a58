"""Finished runs measured by several processes: one alone takes minutes for a large table."""

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence

from deepmoe.comparison.measure import Finished, is_measured, measure_run
from deepmoe.config import DataConfig
from deepmoe.errors import UserError
from deepmoe.launch import threads

_MEASURE = """
import pickle, sys
from deepmoe.comparison.side_by_side import measure_each
measure_each(*pickle.load(sys.stdin.buffer))
"""


def measure_ahead(runs: Sequence[Finished], data: DataConfig, jobs: int) -> None:
    """Leaves figures beside the checkpoints of runs that have none yet.

    A run that can't be measured is passed over: whoever asks for its figures is told why.

    Args:
        runs: that have ended.
        data: as of `measure_run`.
        jobs: processes side by side.
    """
    left = [run for run in runs if run.own and not is_measured(run)]
    jobs = min(jobs, len(left))
    if jobs < 2:
        return
    processes = []
    for number in range(jobs):
        process = subprocess.Popen(
            [sys.executable, "-c", _MEASURE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # whatever goes wrong, the caller meets it too, and tells
            env={**os.environ, "OMP_NUM_THREADS": threads()},
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pickle.dump((left[number::jobs], data), pipe)
        processes.append(process)
    for process in processes:
        process.wait()


def measure_each(runs: Sequence[Finished], data: DataConfig) -> None:
    """Measures those that can be."""
    for run in runs:
        try:
            measure_run(run, data)
        except UserError:
            continue
