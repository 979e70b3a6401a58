"""What a sweep is to train: runs from one small file."""

import dataclasses
import fnmatch
import itertools
import json
import os
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmoe.config import ANOTHER_RUN, RunConfig, apply_overrides, load_config, read_toml
from deepmoe.errors import UserError
from deepmoe.schema import Paths, from_plain

ALL_SEEDS = "runs:"  # "runs:dense" as teachers: dense of all its seeds
# "lessons:dense" as a teacher: what dense of all its seeds say, written down once for all runs
LESSONS = "lessons:"
BETWEEN = ","  # names of the runs that lessons are of, once these are known
GRID_NAME = "grid.toml"  # a file of this name is called after its folder
SEED = re.compile(r"-seed\d+$")  # as run_name() writes it
NAME_CHARACTERS = set(string.ascii_letters + string.digits + "-_.=+")


@dataclass(frozen=True)
class GridFile:
    """What a grid file may hold. Settings are written as for `--set`: "train.lr" = 0.05."""

    preset: str  # a name, or a path from the folder of the grid file
    seeds: tuple[int, ...] = (0,)
    jobs: int = 1  # runs side by side
    views: int = 30  # that lessons are of: see `deepmoe teach`
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of all runs
    # Settings by name; `seeds` among them stands for other seeds than all runs have.
    runs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    grid: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # every combination


@dataclass(frozen=True)
class Run:
    """One training run of a grid."""

    group: str  # runs that differ in their seeds alone
    config: RunConfig

    @property
    def name(self) -> str:
        """Of its folder and its result."""
        return run_name(self.group, self.config.train.seed)

    @property
    def needs(self) -> list[str]:
        """Names of the runs whose checkpoints it takes."""
        paths = (self.config.train.start, *self.config.train.teachers)
        found = [p.removeprefix(ANOTHER_RUN) for p in paths if p and p.startswith(ANOTHER_RUN)]
        return [*found, *self.lessons]

    @property
    def lessons(self) -> list[str]:
        """Names of the runs whose lessons it takes."""
        written = [t for t in self.config.train.teachers if t.startswith(LESSONS)]
        return [name for t in written for name in t.removeprefix(LESSONS).split(BETWEEN)]


@dataclass(frozen=True)
class Grid:
    """All runs of a grid file."""

    runs: tuple[Run, ...]
    jobs: int
    views: int = GridFile.views

    @property
    def in_order(self) -> list[Run]:
        """Its runs, each after those that it needs."""
        return _in_order(self.runs)

    def only(self, patterns: Sequence[str]) -> "Grid":
        """The runs of these names, and those that they need; `*` stands for anything.

        Raises:
            UserError: for a name that no run has.
        """
        wanted: set[str] = set()
        for pattern in patterns:
            named = [r.name for r in self.runs if _is_named(r, pattern)]
            if not named:
                raise UserError(f"no run is named {pattern!r}")
            wanted.update(named)
        for run in reversed(self.in_order):
            if run.name in wanted:
                wanted.update(run.needs)
        return dataclasses.replace(self, runs=tuple(r for r in self.runs if r.name in wanted))


def _is_named(run: Run, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (run.name, run.group))


def run_name(group: str, seed: int) -> str:
    """The name of a group's run with this seed."""
    return f"{group}-seed{seed}"


def group_of(name: str) -> str:
    """The group of a run with this name."""
    return SEED.sub("", name)


def grid_name(path: Path) -> str:
    """What a grid file is called: after its folder if that is all it holds, or after itself."""
    path = Path(os.path.abspath(path))
    return path.parent.name if path.name == GRID_NAME else path.stem


def read_grid(path: Path, overrides: Sequence[str] = ()) -> Grid:
    """Reads a grid file, and checks every configuration in it.

    Args:
        path: of the file.
        overrides: strings such as `train.lr=0.05`, for all runs, above what the file says.

    Raises:
        UserError: for a file that can't be read, unknown keys, or a setting that no run can have.
    """
    file = from_plain(read_toml(path, f"grid {path}"), GridFile)
    seeds = {name: _seeds(path, own.pop("seeds", file.seeds)) for name, own in file.runs.items()}
    values = [*file.grid.values(), *seeds.values()]
    if not file.seeds or min(file.jobs, file.views) < 1 or not all(values):
        raise UserError(
            f"{path} needs at least one seed, one job, one view, and one value of each grid key"
        )
    for key in [*file.settings, *file.grid, *(k for own in file.runs.values() for k in own)]:
        if "." not in key:
            raise UserError(
                f'{path}: settings are written in quotes, such as "train.lr", not {key}'
            )
        if key == "train.seed":
            raise UserError(f"{path}: seeds are written as seeds = [0, 1], at the top or in a run")
    preset = str(path.parent / file.preset) if file.preset.endswith(".toml") else file.preset
    base = apply_overrides(load_config(preset), _overrides(file.settings))
    runs = []
    for name, own in (file.runs or {path.stem: {}}).items():
        for label, combination in _combinations(file.grid):
            config = apply_overrides(base, [*_overrides(own | combination), *overrides])
            config = _labelled(config, label)
            for seed in seeds.get(name, file.seeds):
                seeded = apply_overrides(config, [f"train.seed={seed}"])
                runs.append(Run(name + label, seeded))
    for run in runs:
        for prefix in (ALL_SEEDS, LESSONS):
            if (run.config.train.start or "").startswith(prefix):
                raise UserError(
                    f"{path}: {prefix} is for teachers, a run starts from one other run"
                )
    return make_grid(runs, file.jobs, file.views)


def make_grid(runs: Sequence[Run], jobs: int, views: int = GridFile.views) -> Grid:
    """Runs as a grid; what they take of other runs is found by their seeds.

    Raises:
        UserError: for names that are not good ones, or runs that could never start.
    """
    _check_names(runs)
    runs = [_with_seeded_needs(run, runs) for run in runs]
    _in_order(runs)  # tells of those that could never start
    return Grid(tuple(runs), jobs, views)


def with_checkpoints(
    config: RunConfig, path_of: Callable[[str], Paths], prefix: str = ANOTHER_RUN
) -> RunConfig:
    """The configuration with other paths for the checkpoints of other runs, by their names."""

    def resolved(path: Any) -> Any:
        if isinstance(path, tuple):
            each = map(resolved, path)
            return tuple(
                p for found in each for p in ([found] if isinstance(found, str) else found)
            )
        if path is None or not path.startswith(prefix):
            return path
        return path_of(path.removeprefix(prefix))

    train = config.train
    train = dataclasses.replace(train, start=resolved(train.start), teacher=resolved(train.teacher))
    return dataclasses.replace(config, train=train)


def _seeds(path: Path, seeds: Any) -> tuple[int, ...]:
    """A run's own seeds, checked."""
    if not isinstance(seeds, list | tuple) or not all(type(seed) is int for seed in seeds):
        raise UserError(f"{path}: seeds are a list of whole numbers, not {seeds!r}")
    return tuple(seeds)


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
    try:
        return [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    except TypeError as error:  # TOML has dates, settings have not
        raise UserError(f"a grid's settings are numbers, texts or lists: {error}") from error


def _labelled(config: RunConfig, label: str) -> RunConfig:
    """Of other runs it takes those of the same combination."""

    def labelled(name: str) -> str:
        seed = SEED.search(name)
        return ANOTHER_RUN + group_of(name) + label + (seed.group() if seed else "")

    config = with_checkpoints(config, labelled)
    for prefix in (ALL_SEEDS, LESSONS):
        config = with_checkpoints(config, lambda group, p=prefix: p + group + label, prefix)  # type: ignore[misc]
    return config


def _with_seeded_needs(run: Run, runs: Sequence[Run]) -> Run:
    """It takes other runs of the seed they are named with, of its own, or of their only one."""

    def seeds_of(group: str) -> list[int]:
        return [r.config.train.seed for r in runs if r.group == group]

    def seeded(group: str) -> str:
        if SEED.search(group):
            return ANOTHER_RUN + group
        seeds = seeds_of(group)
        seed = seeds[0] if len(seeds) == 1 else run.config.train.seed
        return ANOTHER_RUN + run_name(group, seed)

    def all_seeds(group: str) -> Paths:
        own = run.config.train.seed  # where there is no such group, to be told so
        return tuple(ANOTHER_RUN + run_name(group, seed) for seed in seeds_of(group) or [own])

    def lessons_of(group: str) -> str:
        if SEED.search(group):  # of runs that are named one by one
            return LESSONS + group
        return LESSONS + BETWEEN.join(p.removeprefix(ANOTHER_RUN) for p in all_seeds(group))

    config = with_checkpoints(run.config, seeded)
    config = with_checkpoints(config, all_seeds, ALL_SEEDS)
    return Run(run.group, with_checkpoints(config, lessons_of, LESSONS))


def _check_names(runs: Sequence[Run]) -> None:
    """Refuses runs that would share a folder, or leave it."""
    names = [run.name for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"two runs are named {sorted(twice)[0]}")
    odd = [run.name for run in runs if not run.group or not set(run.name) <= NAME_CHARACTERS]
    if odd:
        raise UserError(f"a run's name has letters, digits and -_.=+ only, not {odd[0]!r}")
    seeded = [run.group for run in runs if SEED.search(run.group)]
    if seeded:
        raise UserError(f"a run's name does not end in its seed, as {seeded[0]} does")


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """Runs after those that they need.

    Raises:
        UserError: for runs that could never start: they need one that is not there, or each other.
    """
    ordered: list[Run] = []
    started: set[str] = set()
    left = list(runs)
    while ready := [run for run in left if set(run.needs) <= started]:
        started |= {run.name for run in ready}
        ordered += ready
        left = [run for run in left if run not in ready]
    if left:
        run = left[0]
        raise UserError(f"run {run.name} needs {', '.join(run.needs)}, and can't come after it")
    return ordered
