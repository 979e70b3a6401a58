"""Trains the runs of a grid, several side by side; goes on where it was stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepmoe.checkpoint import CheckpointStore, read_progress
from deepmoe.config import RunConfig, config_to_toml
from deepmoe.console import complain
from deepmoe.devices import choose_device
from deepmoe.errors import UserError
from deepmoe.files import exclusive, user_of
from deepmoe.sweep.grid import LESSONS, Grid, Run, group_of, with_checkpoints
from deepmoe.sweep.results import RunResult, add_result, read_results
from deepmoe.training.fit import as_pruned, changed_keys
from deepmoe.training.interrupts import stop_signals
from deepmoe.training.log import METRICS_NAME, read_metrics

POLL_SECONDS = 0.2
LOG_NAME = "log.txt"
TAUGHT = "lessons-"  # what files of lessons are named with, before the group of their teachers


def sweep(grid: Grid, out: Path, results: Path, *, command: str, jobs: int | None = None) -> bool:
    """Trains what has no result yet, several runs side by side.

    Args:
        grid: the runs.
        out: folder of the runs' own folders.
        results: file of one line a run.
        command: to note in the results.
        jobs: runs side by side; as the grid says if not given.

    Returns:
        Whether all runs have a result now. A run that fails does not stop the others; its log
        lies in its folder.

    Raises:
        UserError: for results or runs of other settings, while another sweep uses the folder, or
            while runs of a killed sweep still train.
    """
    out = out.resolve()
    with exclusive(out):
        _train(grid, out, results, command, jobs or grid.jobs)
    done = read_results(results)
    return all(run.name in done for run in grid.runs)


def _train(grid: Grid, out: Path, results: Path, command: str, jobs: int) -> None:
    waiting = _waiting(grid, out, results)
    done = {run.name for run in grid.runs} - {run.name for run in waiting}
    going: list[tuple[Run, subprocess.Popen[bytes]]] = []
    teaching: dict[Path, subprocess.Popen[bytes]] = {}
    former = {s: signal.signal(s, _leave) for s in stop_signals() if s != signal.SIGINT}
    try:
        while waiting or going:
            for run in [run for run in waiting if set(run.needs) <= done]:
                lessons = _lessons(run, out)
                busy = len(going) + sum(p.poll() is None for p in teaching.values())
                if busy >= jobs or (lessons in teaching and not lessons.exists()):
                    continue
                if lessons is not None and lessons not in teaching and _is_stale(lessons, run, out):
                    teaching[lessons] = _teach(run, out, lessons, grid.views)
                    complain(f"{lessons.name}: started")
                    continue
                waiting.remove(run)
                going.append((run, _start(run, out)))
                complain(f"{run.name}: started")
            if not going and all(process.poll() is not None for process in teaching.values()):
                failed = [path for path in teaching if not path.exists()]
                ready = [run for run in waiting if set(run.needs) <= done]
                if any(_lessons(run, out) not in failed for run in ready):
                    continue  # lessons have just been written
                for path in failed:
                    complain(f"{path.name}: failed, {_reason(1, _log_of(path))}")
                complain(f"{', '.join(run.name for run in waiting)}: needs a run that failed")
                break
            time.sleep(POLL_SECONDS)
            for run, process in [pair for pair in going if pair[1].poll() is not None]:
                going.remove((run, process))
                if _collect(run, process.returncode, out, results, command):
                    done.add(run.name)
    finally:
        started = [*(process for _, process in going), *teaching.values()]
        for process in started:  # they save a checkpoint, to go on from next time
            process.terminate()
        for process in started:
            process.wait()
        for number, handler in former.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: Any) -> None:
    sys.exit(128 + number)


def _waiting(grid: Grid, out: Path, results: Path) -> list[Run]:
    """Runs without a result, and those whose checkpoints they need but are not there any more."""
    done = read_results(results)
    _check_results(grid, done, results)
    waiting = [run for run in grid.runs if run.name not in done]
    for run in waiting:  # it grows on the way
        _check_begun(run, out)
        needed = [r for r in grid.runs if r.name in run.needs and r not in waiting]
        waiting += [r for r in needed if not _is_trained(r, out)]
    _check_free(waiting, out)
    return waiting


def _check_results(grid: Grid, done: Mapping[str, RunResult], path: Path) -> None:
    """Refuses results that are not of this grid, or not of the results beside them."""
    names = {run.name for run in grid.runs}
    for run in grid.runs:
        if run.name not in done:
            continue
        if not done[run.name].is_of(run):
            raise UserError(
                f"{run.name} in {path} is of other settings than the grid's: remove its line, "
                "or name another file by --results"
            )
        for need, digest in done[run.name].needs.items():
            if need in names and (need not in done or done[need].digest != digest):
                raise UserError(
                    f"{run.name} in {path} is of a {need} that is not the one there: "
                    "remove its line, or name another file by --results"
                )


def _check_free(runs: list[Run], out: Path) -> None:
    """Refuses to start runs that a sweep has left training when it was killed."""
    users = {run.name: user_of(out / run.name) for run in runs}
    busy = [f"{name} is still being trained by {user}" for name, user in users.items() if user]
    if busy:
        raise UserError(
            f"{' and '.join(busy)}, left by a sweep that was killed: wait for it, or stop it "
            "(it saves), then start this sweep again"
        )


def _is_trained(run: Run, out: Path) -> bool:
    """Whether its last checkpoint is there, of these settings, and not one on the way."""
    path = _last_checkpoint(out, run.name)
    if not path.exists():
        return False
    config, state = read_progress(path)
    now = as_pruned(run.config, path)
    return state.epoch == config.train.total_epochs and not changed_keys(config, now)


def _check_begun(run: Run, out: Path) -> None:
    """Refuses to go on with a run from other networks than it was begun with."""
    path = _last_checkpoint(out, run.name)
    if not path.exists():
        return

    def taken(paths: tuple[str | None, ...]) -> list[tuple[str, ...]]:
        # The folder of all runs may have moved; lessons lie in it, checkpoints a folder below.
        found = [Path(p).parts for p in paths if p]
        return [parts[-1:] if parts[-1].startswith(TAUGHT) else parts[-2:] for parts in found]

    begun, now = read_progress(path)[0].train, _resolved(run, out).train
    if taken((begun.start, *begun.teachers)) != taken((now.start, *now.teachers)):
        raise UserError(f"{path.parent} was begun with another start or teacher: remove or move it")


def _start(run: Run, out: Path) -> "subprocess.Popen[bytes]":
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "sweep.toml"
    config.write_text(config_to_toml(_resolved(run, out)), encoding="utf-8")
    return _launch(["train", str(config), "--resume", "--out", str(folder)], folder / LOG_NAME)


def _teach(run: Run, out: Path, lessons: Path, views: int) -> "subprocess.Popen[bytes]":
    lessons.unlink(missing_ok=True)
    checkpoints = [str(_last_checkpoint(out, name)) for name in run.lessons]
    root = f"data.root={run.config.data.root}"
    options = ["--views", str(views), "--out", str(lessons), "--set", root]
    return _launch(["teach", *checkpoints, *options], _log_of(lessons))


def _lessons(run: Run, out: Path) -> Path | None:
    """The file of the lessons that a run takes, if it takes any."""
    return out / f"{TAUGHT}{group_of(run.lessons[0])}.safetensors" if run.lessons else None


def _is_stale(lessons: Path, run: Run, out: Path) -> bool:
    """Whether lessons are still to be written, or older than one of the networks they are of."""
    if not lessons.exists():
        return True
    written = lessons.stat().st_mtime_ns
    return any(_last_checkpoint(out, name).stat().st_mtime_ns > written for name in run.lessons)


def _log_of(lessons: Path) -> Path:
    return lessons.with_suffix(".log")


def _launch(arguments: list[str], log_file: Path) -> "subprocess.Popen[bytes]":
    with log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "deepmoe", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C is for this process alone: it asks the runs to stop, once, and they save.
            start_new_session=True,
            # Runs share the processors: each one asking for all of them makes all of them slow.
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")},
        )


def _collect(run: Run, code: int, out: Path, results: Path, command: str) -> bool:
    """Writes the result of a run that has ended; whether there is one."""
    folder = out / run.name
    metrics = read_metrics(folder / METRICS_NAME)
    if code or not metrics:
        complain(f"{run.name}: failed, {_reason(code, folder / LOG_NAME)}")
        return False
    if run.name in read_results(results):
        complain(f"{run.name}: done, for its checkpoint; its line in {results} is left as it was")
        return True
    device = choose_device(run.config.train.device)
    add_result(results, run, metrics, command=command, device=device)
    complain(f"{run.name}: done")
    return True


def _reason(code: int, log: Path) -> str:
    """Why a run failed, as far as can be told in a line."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}, see {log}"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = text.splitlines()
    told = [line for line in lines if line.startswith("Error: ")] or lines
    return f"see {log}: {told[-1]}" if told else f"see {log}"


def _resolved(run: Run, out: Path) -> RunConfig:
    """Its configuration, with paths for the checkpoints of other runs."""
    config = with_checkpoints(run.config, lambda name: str(_last_checkpoint(out, name)))
    return with_checkpoints(config, lambda _: str(_lessons(run, out)), LESSONS)


def _last_checkpoint(out: Path, name: str) -> Path:
    return CheckpointStore(out / name, keep=0).last
