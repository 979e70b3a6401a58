"""Many training runs from one file, several side by side; goes on where it was stopped."""

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepmoe.config import DataConfig, RunConfig, apply_overrides, config_to_toml, load_config
from deepmoe.errors import UserError
from deepmoe.results import write_result
from deepmoe.structure import structured
from deepmoe.training.checkpoint import CheckpointStore
from deepmoe.training.log import METRICS_NAME, read_metrics

POLL_SECONDS = 0.2
ANOTHER_RUN = "run:"  # "run:dense" as a checkpoint: that of the run named dense, of the same seed
NOT_FIGURES = ("epoch", "stage")  # keys of a run's last metrics that the table leaves out


@dataclass(frozen=True)
class GridFile:
    """What a grid file may hold. Settings are written as for `--set`: "train.lr" = 0.05."""

    preset: str  # a name, or a path from the folder of the grid file
    seeds: tuple[int, ...] = (0,)
    jobs: int = 1  # runs side by side
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of all runs
    runs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # settings by name
    grid: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # every combination


@dataclass(frozen=True)
class Run:
    """One training run of a grid."""

    group: str  # runs that differ in their seeds alone
    config: RunConfig

    @property
    def name(self) -> str:
        """Of its folder and its result."""
        return f"{self.group}-seed{self.config.train.seed}"

    @property
    def needs(self) -> list[str]:
        """Names of the runs whose checkpoints it takes."""
        paths = (self.config.train.start, self.config.train.teacher)
        groups = [p.removeprefix(ANOTHER_RUN) for p in paths if p and p.startswith(ANOTHER_RUN)]
        return [f"{group}-seed{self.config.train.seed}" for group in groups]


@dataclass(frozen=True)
class Grid:
    """All runs of a grid file."""

    runs: tuple[Run, ...]
    jobs: int


def read_grid(path: Path) -> Grid:
    """Reads a grid file, and checks every configuration in it.

    Raises:
        UserError: for a file that can't be read, unknown keys, or a setting that no run can have.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read grid {path}: {error.strerror}") from error
    file = structured(values, GridFile)
    if not file.seeds or file.jobs < 1:
        raise UserError(f"{path} needs at least one seed and one job")
    preset = str(path.parent / file.preset) if file.preset.endswith(".toml") else file.preset
    base = apply_overrides(load_config(preset), _overrides(file.settings))
    runs = []
    for name, own in (file.runs or {path.stem: {}}).items():
        for label, combination in _combinations(file.grid):
            config = apply_overrides(base, _overrides(own | combination))
            for seed in file.seeds:
                seeded = apply_overrides(config, [f"train.seed={seed}"])
                runs.append(Run(name + label, seeded))
    _check_needs(runs)
    return Grid(tuple(runs), file.jobs)


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
    waiting = [run for run in grid.runs if not result_path(results, run).exists()]
    done = {run.name for run in grid.runs} - {run.name for run in waiting}
    going: list[tuple[Run, subprocess.Popen[bytes]]] = []
    try:
        while waiting or going:
            for run in [run for run in waiting if set(run.needs) <= done]:
                if len(going) < (jobs or grid.jobs):
                    waiting.remove(run)
                    going.append((run, _start(run, out)))
                    print(f"{run.name}: started", flush=True)
            if not going:
                print(f"{', '.join(run.name for run in waiting)}: needs a run that failed")
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
    return all(result_path(results, run).exists() for run in grid.runs)


def result_path(results: Path, run: Run) -> Path:
    """Where a run's figures are."""
    return results / f"{run.name}.json"


def summary(grid: Grid, results: Path) -> list[dict[str, Any]]:
    """One row for each group of runs: mean and sample deviation over the seeds that are done."""
    rows = []
    for group, members in itertools.groupby(grid.runs, key=lambda run: run.group):
        paths = [result_path(results, run) for run in members]
        found = [json.loads(p.read_text(encoding="utf-8"))["values"] for p in paths if p.exists()]
        row: dict[str, Any] = {"run": group, "seeds": len(found)}
        for key in found[0]["last"] if found else ():
            figures = [values["last"][key] for values in found]
            if key not in NOT_FIGURES and all(isinstance(f, int | float) for f in figures):
                row[key] = statistics.fmean(figures)
                if len(figures) > 1:
                    row[f"{key}_deviation"] = statistics.stdev(figures)
        rows.append(row)
    return rows


def _combinations(grid: Mapping[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for values in itertools.product(*grid.values()):
        combination = dict(zip(grid, values, strict=True))
        label = "".join(
            f"-{key.split('.')[-1]}={_as_text(value)}" for key, value in combination.items()
        )
        yield label, combination


def _as_text(value: Any) -> str:
    """A setting as part of a file's name."""
    text = json.dumps(value) if isinstance(value, list) else str(value)
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text).strip("_")


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def _start(run: Run, out: Path) -> "subprocess.Popen[bytes]":
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "sweep.toml"
    config.write_text(config_to_toml(_with_paths(run, out)), encoding="utf-8")
    command = [sys.executable, "-m", "deepmoe", "train", str(config)]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [*command, "--resume", "--out", str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            # Runs share the processors: each one asking for all of them makes all of them slow.
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")},
        )


def _with_paths(run: Run, out: Path) -> RunConfig:
    """The configuration with checkpoints of other runs by their paths."""

    def resolved(path: str | None) -> str | None:
        if path is None or not path.startswith(ANOTHER_RUN):
            return path
        name = f"{path.removeprefix(ANOTHER_RUN)}-seed{run.config.train.seed}"
        return str(CheckpointStore(out / name, keep=0).last)

    train = run.config.train
    train = dataclasses.replace(train, start=resolved(train.start), teacher=resolved(train.teacher))
    return dataclasses.replace(run.config, train=train)


def _check_needs(runs: list[Run]) -> None:
    """Refuses runs that could never start: they need one that is not there, or each other."""
    started: set[str] = set()
    left = list(runs)
    while ready := [run for run in left if set(run.needs) <= started]:
        started |= {run.name for run in ready}
        left = [run for run in left if run not in ready]
    if left:
        run = left[0]
        raise UserError(f"run {run.name} needs {', '.join(run.needs)}, which can't come before it")


def _collect(run: Run, code: int, out: Path, results: Path, command: str) -> bool:
    """Writes the result of a run that has ended; whether there is one."""
    folder = out / run.name
    lines = read_metrics(folder / METRICS_NAME)
    if code or not lines:
        print(f"{run.name}: failed, see {folder / 'log.txt'}", flush=True)
        return False
    data = dataclasses.replace(run.config.data, root=DataConfig().root)  # it says nothing elsewhere
    values = {
        "run": run.name,
        "config": config_to_toml(dataclasses.replace(run.config, data=data)),
        "seconds": sum(line.get("seconds", 0.0) for line in lines),
        "last": lines[-1],
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = run.config.train.seed
    write_result(result_path(results, run), values, command=command, seed=seed, device=device)
    print(f"{run.name}: done", flush=True)
    return True
