"""The steps of a sweep: runs, and the lessons that some of them take."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepmoe.config import RunConfig, config_to_toml
from deepmoe.console import complain
from deepmoe.devices import choose_device
from deepmoe.files import check_writable, write_atomically
from deepmoe.results import origin
from deepmoe.sweep.grid import LESSONS, Run, group_of, with_checkpoints
from deepmoe.sweep.results import add_result, read_results
from deepmoe.sweep.schedule import End, Job, Step
from deepmoe.training.checkpoint_store import CheckpointStore
from deepmoe.training.fit import fit
from deepmoe.training.lessons import is_lessons, teach_from
from deepmoe.training.log import METRICS_NAME, read_metrics

LOG_NAME = "log.txt"
NEEDS = "needs.json"  # in a run's folder: digests of the results that its checkpoints go with
TAUGHT = "lessons-"  # what files of lessons are named with, before the group of their teachers


def steps_of(
    runs: Sequence[Run], out: Path, results: Path, *, command: str, views: int
) -> Iterator[Step]:
    """Each run, and lessons before the first run that takes them.

    Args:
        runs: to be trained.
        out: folder of the runs' own folders.
        results: file of one line a run.
        command: to note in the results.
        views: that lessons are of.
    """
    taught: set[Path] = set()
    for run in runs:
        lessons = lessons_of(run, out)
        if lessons is not None and lessons not in taught:
            taught.add(lessons)
            yield Teaching(run, out, lessons, views)
        yield Training(run, out, results, command)


@dataclass(frozen=True)
class Training:
    """A run is trained, and its result noted."""

    run: Run
    out: Path
    results: Path
    command: str

    @property
    def name(self) -> str:
        """Of the run."""
        return self.run.name

    @property
    def needs(self) -> set[str]:
        """Runs whose checkpoints it takes, and its lessons."""
        lessons = lessons_of(self.run, self.out)
        return {*self.run.needs, *([] if lessons is None else [lessons.name])}

    def begin(self) -> Job:
        """From its last checkpoint, if it has one that goes with what it starts from now."""
        folder = self.out / self.name
        check_writable(folder / LOG_NAME)
        folder.mkdir(parents=True, exist_ok=True)
        self._drop_old(folder)
        path, config = folder / "sweep.toml", resolved(self.run, self.out)
        path.write_text(config_to_toml(config), encoding="utf-8")
        arguments = ("train", str(path), "--resume", "--out", str(folder))
        call = partial(fit, config, folder, resume=True, quiet=True)
        device = self.run.config.train.device
        return Job(self.name, arguments, folder / LOG_NAME, device, call, folder)

    def _drop_old(self, folder: Path) -> None:
        """Removes checkpoints that nothing can go on from, and notes what new ones start from."""
        done, store, path = read_results(self.results), CheckpointStore(folder, 0), folder / NEEDS
        needs = {name: done[name].digest for name in self.run.needs if name in done}
        why = None
        if not store.last.exists():
            why = f"{store.last.name} is gone" if store.any() else None
        elif path.exists() and path.read_bytes() != _as_json(needs):
            why = f"its checkpoint goes with another result of {' or '.join(needs)}"
        if why is not None:
            complain(f"{self.name}: {why}, so it is trained from the beginning")
            store.clear()
            (folder / METRICS_NAME).unlink(missing_ok=True)
        write_atomically(path, _as_json(needs))

    def end(self, end: End) -> bool:
        """Writes the result of a run that has ended; whether there is one."""
        folder = self.out / self.name
        metrics = read_metrics(folder / METRICS_NAME)
        if end.code or not metrics:
            complain(f"{self.name}: failed, {_reason(end.code, folder / LOG_NAME)}")
            return False
        if self.name in read_results(self.results):
            kept = f"its line in {self.results} is left as it was"
            complain(f"{self.name}: done, for its checkpoint; {kept}")
            return True
        measured = end.origin or origin(choose_device(self.run.config.train.device))
        add_result(self.results, self.run, metrics, command=self.command, origin=measured)
        complain(f"{self.name}: done")
        return True


@dataclass(frozen=True)
class Teaching:
    """Lessons are written, once for all runs that take them."""

    run: Run  # one of them
    out: Path
    lessons: Path
    views: int

    @property
    def name(self) -> str:
        """Of the file."""
        return self.lessons.name

    @property
    def needs(self) -> set[str]:
        """The teachers."""
        return set(self.run.lessons)

    def begin(self) -> Job | None:
        """Nothing is to be done where they are whole, and of the networks that are there now."""
        teachers = [last_checkpoint(self.out, name) for name in self.run.lessons]
        if self.lessons.exists():
            written = self.lessons.stat().st_mtime_ns
            fresh = all(path.stat().st_mtime_ns <= written for path in teachers)
            if fresh and is_lessons(str(self.lessons)):
                return None
            self.lessons.unlink()
        root = f"data.root={self.run.config.data.root}"
        options = ("--views", str(self.views), "--out", str(self.lessons), "--set", root)
        arguments = ("teach", *map(str, teachers), *options)
        call = partial(teach_from, teachers, self.views, self.lessons, [root])
        return Job(self.name, arguments, self._log, self.run.config.train.device, call)

    def end(self, end: End) -> bool:
        """Whether they are there."""
        if end.code or not self.lessons.exists():
            complain(f"{self.name}: failed, {_reason(end.code, self._log)}")
            return False
        complain(f"{self.name}: done")
        return True

    @property
    def _log(self) -> Path:
        return self.lessons.with_suffix(".log")


@dataclass(frozen=True)
class Following:
    """What is done with runs as soon as they have ended, such as measuring them.

    Whoever asks for what it leaves meets a failure again, and tells of it.
    """

    name: str
    needs: set[str]  # the runs
    job: Callable[[], Job | None]  # what is to be run; `None` where nothing is left to do

    def begin(self) -> Job | None:
        """Its job, as things are now."""
        return self.job()

    def end(self, end: End) -> bool:
        """Whether it went well."""
        return not end.code


def lessons_of(run: Run, out: Path) -> Path | None:
    """The file of the lessons that a run takes, if it takes any."""
    return out / f"{TAUGHT}{group_of(run.lessons[0])}.safetensors" if run.lessons else None


def resolved(run: Run, out: Path) -> RunConfig:
    """Its configuration, with paths for the checkpoints of other runs."""
    config = with_checkpoints(run.config, lambda name: str(last_checkpoint(out, name)))
    return with_checkpoints(config, lambda _: str(lessons_of(run, out)), LESSONS)


def last_checkpoint(out: Path, name: str) -> Path:
    """The newest checkpoint of a run, by its name."""
    return CheckpointStore(out / name, keep=0).last


def _as_json(needs: dict[str, str]) -> bytes:
    return (json.dumps(needs, indent=2, sort_keys=True) + "\n").encode()


def _reason(code: int, log: Path) -> str:
    """Why a job failed, as far as can be told in a line."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}, see {log}"
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it could not be written, either
        lines = []
    told = [line for line in lines if line.startswith("Error: ")] or lines
    return f"see {log}: {told[-1]}" if told else f"see {log}"
