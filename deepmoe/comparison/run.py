"""A comparison from beginning to end: trains what is missing, measures, and fills the table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmoe.bench.latency import Latency
from deepmoe.checkpoint import read_checksum, read_progress
from deepmoe.comparison.asked import (
    START,
    Asked,
    Row,
    comparison_grid,
    rows_of,
    start_row,
)
from deepmoe.comparison.measure import EXITS_NAME, Measured, measure_latency, measure_run
from deepmoe.comparison.table import comparison_table
from deepmoe.console import complain
from deepmoe.errors import TrainingInterrupted, UserError, reason
from deepmoe.files import read_regular, write_atomically
from deepmoe.sweep import RESULTS_NAME, Grid, read_results, sweep
from deepmoe.sweep.grid import run_name
from deepmoe.sweep.steps import last_checkpoint, resolved
from deepmoe.training import fit
from deepmoe.training.fit import as_pruned, changed_keys

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
        quiet: show no progress.
    """
    rows, out = rows_of(asked), Path(out)
    grid = comparison_grid(asked, rows, jobs)
    _check_settings(grid, out)
    _check_inputs(asked, out)
    if len(rows) * len(asked.seeds) == 1 and ray is None and asked.teacher is None:
        _train_here(grid, out, quiet)
        complete = True
    else:
        complete = sweep(grid, out, out / RESULTS_NAME, command=command, jobs=jobs, ray=ray)
    rows = [start_row(asked), *rows]
    measured = {row.name: _measured(row, asked, out) for row in rows}
    complete = complete and all(measured.values())
    latencies = _latencies(rows, asked, out, latency_images) if latency_images else {}
    checkpoints = {
        row.name: _checkpoint(row, asked, asked.seeds[0], out)
        for row in rows[1:]
        if measured[row.name]
    }
    return Comparison(comparison_table(rows, measured, latencies), checkpoints, complete)


def _check_settings(grid: Grid, out: Path) -> None:
    """Refuses a folder that holds a comparison with other settings."""
    done = read_results(out / RESULTS_NAME)
    for run in grid.runs:
        path = last_checkpoint(out, run.name)
        other = run.name in done and not done[run.name].is_of(run)
        if path.exists():
            other |= bool(changed_keys(read_progress(path)[0], as_pruned(run.config, path)))
        if other:
            raise UserError(
                f"{out} holds a {run.name} that was trained with other settings: give another --out"
            )


def _check_inputs(asked: Asked, out: Path) -> None:
    """Refuses a folder whose runs began with another start or teacher, whatever it is called."""
    given = asked.base.train.start
    inputs = {
        "start": None if given is None else read_checksum(given),
        "teachers": [read_checksum(path) for path in asked.teacher_checkpoints],
    }
    noted = out / INPUTS_NAME
    if not noted.exists() and any(out.glob(last_checkpoint(Path(), "*").as_posix())):
        raise UserError(
            f"{out} holds runs, but no {INPUTS_NAME} that tells what they start and learn from: "
            "give another --out"
        )
    if noted.exists() and _read_inputs(noted) != inputs:
        raise UserError(f"{out} holds a comparison of another start or teacher: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(noted, json.dumps(inputs).encode())


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
            stopped = str(error).partition(";")[0]
            raise TrainingInterrupted(
                f"{stopped}; {out / run.name} is saved, and the same command goes on from it"
            ) from error


def _measured(row: Row, asked: Asked, out: Path) -> list[Measured]:
    paths = dict.fromkeys(_last_of(row, asked, seed, out) for seed in asked.seeds)
    ended = [path for path in paths if _is_finished(path)]
    try:
        return [measure_run(row, path, out, asked.base.data) for path in ended]
    except UserError as error:  # such as exits that can't be fitted: other rows have theirs
        complain(f"{row.name}: {error}")
        return []


def _last_of(row: Row, asked: Asked, seed: int, out: Path) -> Path:
    """The last checkpoint of a row's run; all seeds may start from one that was given."""
    given = asked.base.train.start if row.name == START else None
    return last_checkpoint(out, run_name(row.name, seed)) if given is None else Path(given)


def _checkpoint(row: Row, asked: Asked, seed: int, out: Path) -> Path:
    last = _last_of(row, asked, seed, out)
    return last.with_name(EXITS_NAME) if row.method.fits_exits else last


def _is_finished(path: Path) -> bool:
    """Whether a run has come to its end, by its last checkpoint."""
    if not path.exists():
        return False
    config, state = read_progress(path)
    return state.epoch == config.train.total_epochs


def _latencies(rows: Sequence[Row], asked: Asked, out: Path, images: int) -> dict[str, Latency]:
    """Of each row's first seed, beside the first row's: the network that all start from."""
    seed, found = asked.seeds[0], {}
    dense = _checkpoint(rows[0], asked, seed, out)
    for row in rows[1:]:
        checkpoint = _checkpoint(row, asked, seed, out)
        if checkpoint.exists() and _is_finished(checkpoint):
            complain(f"{row.name}: timing")
            found[row.name] = measure_latency(checkpoint, dense, asked.base.data, images)
    return found
