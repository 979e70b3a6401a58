"""A comparison from beginning to end: trains what is missing, measures, and fills the table."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmoe.bench.latency import Latency
from deepmoe.checkpoint import read_checksum
from deepmoe.comparison.asked import (
    START,
    Asked,
    Row,
    comparison_grid,
    rows_of,
    start_row,
)
from deepmoe.comparison.measure import (
    Finished,
    Measured,
    is_finished,
    is_measured,
    measure_latency,
    measure_run,
)
from deepmoe.comparison.measuring import measuring
from deepmoe.comparison.table import comparison_table
from deepmoe.config import DataConfig
from deepmoe.console import complain
from deepmoe.devices import choose_device
from deepmoe.errors import TrainingInterrupted, UserError, reason
from deepmoe.files import read_regular, write_atomically
from deepmoe.sweep import RESULTS_NAME, Grid, check_settings, sweep
from deepmoe.sweep.grid import run_name
from deepmoe.sweep.local import LocalProcesses
from deepmoe.sweep.schedule import work_off
from deepmoe.sweep.steps import Following, last_checkpoint, resolved
from deepmoe.training import fit
from deepmoe.training.lessons import is_lessons

INPUTS_NAME = "inputs.json"  # what the runs of a folder start and learn from


@dataclass(frozen=True)
class Comparison:
    """A comparison that was run.

    Attributes:
        table: figures of each row, as plain values.
        checkpoints: what each row's first seed has left, by the row's name.
        complete: whether all runs have ended well.
    """

    table: list[dict[str, Any]]
    checkpoints: dict[str, Path]
    complete: bool


def run_comparison(
    asked: Asked,
    out: str | Path,
    *,
    command: str,
    jobs: int = 1,
    ray: str | None = None,
    latency_images: int = 0,
    train: bool = True,
    quiet: bool = False,
) -> Comparison:
    """Trains all runs that are not finished, and measures what they have left.

    Args:
        asked: what is compared.
        out: folder of the runs' own folders; calling it again goes on there.
        command: to note in the results.
        jobs: runs side by side.
        ray: address of a Ray cluster that trains them, in place of this machine.
        latency_images: test images to time on the CPU, one at a time; 0 for none.
        train: whether to; if not, the table is of what is finished.
        quiet: show no progress.
    """
    rows, out = rows_of(asked), Path(out)
    grid = comparison_grid(asked, rows, jobs)
    check_settings(grid, out, out / RESULTS_NAME)
    ended = [] if train else [is_finished(last_checkpoint(out, run.name)) for run in grid.runs]
    if not train and not any(ended):
        raise UserError(f"{out} holds no finished run of these methods: leave out --no-train")
    if train and ray is None:
        choose_device(asked.base.train.device)
    _check_inputs(asked, out)
    alone = len(rows) * len(asked.seeds) == 1 and asked.teacher is None
    rows = [start_row(asked), *rows]
    runs = {row.name: _runs_of(row, asked, out) for row in rows}
    afterwards = _measuring(runs, asked)
    if not train:
        work_off(afterwards, LocalProcesses(jobs))
        complete = all(ended)
    elif alone and ray is None:
        _train_here(grid, out, quiet)
        complete = True
    else:
        results = out / RESULTS_NAME
        complete = sweep(
            grid, out, results, command=command, jobs=jobs, ray=ray, afterwards=afterwards
        )
    finished = {name: [run for run in found if _has_ended(run)] for name, found in runs.items()}
    lost = [run for name, found in runs.items() for run in found if run not in finished[name]]
    for run in lost if complete else ():  # those of runs that failed have been told of
        complain(
            f"{run.checkpoint} is gone, though its run has ended: remove its folder, and its line "
            f"of {RESULTS_NAME}, to train it again"
        )
    measured = {name: _measured(runs, asked.base.data) for name, runs in finished.items()}
    complete = complete and not lost and all(measured.values())
    left = {name: runs[0] for name, runs in finished.items() if measured[name]}
    latencies = _latencies(left, asked, latency_images) if latency_images else {}
    checkpoints = {name: run.model for name, run in left.items() if name != START}
    return Comparison(comparison_table(rows, measured, latencies), checkpoints, complete)


def _check_inputs(asked: Asked, out: Path) -> None:
    """Refuses a folder whose runs began with another start or teacher, whatever it is called."""
    given = asked.base.train.start
    inputs = {
        "start": None if given is None else read_checksum(given),
        "teachers": [_checksum(path) for path in asked.teacher_checkpoints],
    }
    noted = out / INPUTS_NAME
    begun = any(out.glob(last_checkpoint(Path(), "*").as_posix()))
    if begun and not noted.exists():
        raise UserError(
            f"{out} holds runs, but no {INPUTS_NAME} that says what they start and learn from: "
            "give another --out"
        )
    if begun and _read_inputs(noted) != inputs:
        raise UserError(f"{out} holds a comparison of another start or teacher: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(noted, json.dumps(inputs).encode())


def _checksum(teacher: Path) -> str:
    if not is_lessons(str(teacher)):
        return read_checksum(teacher)
    with teacher.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _read_inputs(path: Path) -> Any:
    try:
        return json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({reason(error)}): give another --out") from error


def _train_here(grid: Grid, out: Path, quiet: bool) -> None:
    """One run after the other, in this process, whose progress is shown."""
    for run in grid.in_order:
        complain(f"{run.name}:")
        try:
            fit(resolved(run, out), out / run.name, resume=True, quiet=quiet)
        except TrainingInterrupted as error:
            raise error.resumed_by("the same command") from error


def _runs_of(row: Row, asked: Asked, out: Path) -> list[Finished]:
    """The row's last runs, of all seeds, once they have ended; all may start from a given one."""
    given = asked.base.train.start if row.name == START else None
    found: dict[Path, Finished] = {}
    for seed in asked.seeds:
        *before, last = [out / run_name(step.name, seed) for step in row.steps]
        path = last_checkpoint(out, last.name) if given is None else Path(given)
        exits_for = row.share if row.method.fits_exits else None
        found[path] = Finished(row.name, path, given is None, exits_for, tuple(before))
    return list(found.values())


def _has_ended(run: Finished) -> bool:
    """A start that was given is taken as it is: it may be the best of its epochs, not the last."""
    return not run.own or is_finished(run.checkpoint)


def _measuring(runs: Mapping[str, Sequence[Finished]], asked: Asked) -> list[Following]:
    """What has no figures yet; a start that was given is measured each time, in this process."""
    left = [run for of_row in runs.values() for run in of_row if run.own and not is_measured(run)]
    return [measuring(run, asked.base.data, asked.base.train.device) for run in left]


def _measured(runs: Sequence[Finished], data: DataConfig) -> list[Measured]:
    try:
        return [measure_run(run, data) for run in runs]
    except UserError as error:  # such as exits that can't be fitted: other rows have theirs
        complain(f"{runs[0].row}: {error}")
        return []


def _latencies(left: Mapping[str, Finished], asked: Asked, images: int) -> dict[str, Latency]:
    """Of each row's first seed, beside the first row's: the network that all start from."""
    found: dict[str, Latency] = {}
    if START not in left:
        return found
    dense = left[START].checkpoint
    for name, run in left.items():
        if name != START:
            complain(f"{name}: timing")
            found[name] = measure_latency(run, dense, asked.base.data, images)
    return found
