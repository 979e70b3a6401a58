"""Trains the runs of a grid, several side by side; goes on where it was stopped."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import torch

from deepmoe.config import DataConfig, RunConfig, config_from_dict, config_to_toml
from deepmoe.errors import UserError
from deepmoe.results import write_result
from deepmoe.sweep.grid import Grid, Run, with_checkpoints
from deepmoe.training.checkpoint import CheckpointStore
from deepmoe.training.log import METRICS_NAME, read_metrics

POLL_SECONDS = 0.2


def sweep(grid: Grid, out: Path, results: Path, *, command: str, jobs: int | None = None) -> bool:
    """Trains what has no result yet, several runs side by side.

    Args:
        grid: the runs.
        out: folder of the runs' own folders.
        results: folder of one JSON a run.
        command: to note in the results.
        jobs: runs side by side; as the grid says if not given.

    Returns:
        Whether all runs have a result now. A run that fails does not stop the others; its log
        lies in its folder.
    """
    out = out.resolve()
    waiting = _waiting(grid, out, results)
    done = {run.name for run in grid.runs} - {run.name for run in waiting}
    going: list[tuple[Run, subprocess.Popen[bytes]]] = []
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while waiting or going:
            for run in [run for run in waiting if set(run.needs) <= done]:
                if len(going) < (jobs or grid.jobs):
                    waiting.remove(run)
                    going.append((run, _start(run, out)))
                    _tell(f"{run.name}: started")
            if not going:
                _tell(f"{', '.join(run.name for run in waiting)}: needs a run that failed")
                break
            time.sleep(POLL_SECONDS)
            for run, process in [pair for pair in going if pair[1].poll() is not None]:
                going.remove((run, process))
                if _collect(run, process.returncode, out, results, command):
                    done.add(run.name)
    finally:
        for _, process in going:  # they save a checkpoint, to go on from next time
            process.terminate()
        for _, process in going:
            process.wait()
        signal.signal(signal.SIGTERM, former)
    return all(result_path(results, run).exists() for run in grid.runs)


def result_path(results: Path, run: Run) -> Path:
    """Where a run's figures are."""
    return results / f"{run.name}.json"


def _waiting(grid: Grid, out: Path, results: Path) -> list[Run]:
    """Runs without a result, and those whose checkpoints they need but are not there any more."""
    for run in grid.runs:
        path = result_path(results, run)
        if path.exists() and _config_of(path) != _without_root(run.config):
            raise UserError(f"{path} is of other settings than the grid's: remove or move it")
    waiting = [run for run in grid.runs if not result_path(results, run).exists()]
    for run in waiting:  # it grows on the way
        needed = [r for r in grid.runs if r.name in run.needs and r not in waiting]
        waiting += [r for r in needed if not _last_checkpoint(out, r.name).exists()]
    return waiting


def _start(run: Run, out: Path) -> "subprocess.Popen[bytes]":
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "sweep.toml"
    resolved = with_checkpoints(run.config, lambda name: str(_last_checkpoint(out, name)))
    config.write_text(config_to_toml(resolved), encoding="utf-8")
    command = [sys.executable, "-m", "deepmoe", "train", str(config)]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [*command, "--resume", "--out", str(folder)],
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
    lines = read_metrics(folder / METRICS_NAME)
    if code or not lines:
        _tell(f"{run.name}: failed, see {folder / 'log.txt'}")
        return False
    values = {
        "run": run.name,
        "config": config_to_toml(_without_root(run.config)),
        "seconds": sum(line.get("seconds", 0.0) for line in lines),
        "last": lines[-1],
    }
    device = run.config.train.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = run.config.train.seed
    write_result(result_path(results, run), values, command=command, seed=seed, device=device)
    _tell(f"{run.name}: done")
    return True


def _last_checkpoint(out: Path, name: str) -> Path:
    return CheckpointStore(out / name, keep=0).last


def _without_root(config: RunConfig) -> RunConfig:
    """Where the data lies says nothing elsewhere."""
    data = dataclasses.replace(config.data, root=DataConfig().root)
    return dataclasses.replace(config, data=data)


def _config_of(path: Path) -> RunConfig:
    """The configuration that a result was measured with."""
    values = json.loads(path.read_text(encoding="utf-8"))["values"]
    return config_from_dict(tomllib.loads(values["config"]))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
