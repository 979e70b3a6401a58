"""Steps in the order in which they can be done; who does them is left to a backend."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepmoe.console import complain
from deepmoe.training.interrupts import stop_signals

POLL_SECONDS = 0.2  # between two looks at jobs that run elsewhere


@dataclass(frozen=True)
class Job:
    """A `deepmoe` command to be run to its end."""

    name: str
    arguments: tuple[str, ...]  # a verb and what follows it
    log: Path  # its output is added to this file
    device: str  # as train.device says
    call: Callable[[], object]  # the same in this process
    own: Path | None = None  # folder that it has to itself


@dataclass(frozen=True)
class End:
    """How a job ended."""

    code: int  # as of a process
    origin: dict[str, Any] | None = None  # of its figures, if it was not run on this machine


class Backend(Protocol):
    """Who runs jobs."""

    taken: str  # what is said of a job once it is given away
    poll_seconds: float  # between two looks at its jobs

    def has_room(self) -> bool:
        """Whether it takes another job."""

    def start(self, job: Job) -> None:
        """Takes a job."""

    def ended(self) -> list[tuple[Job, End]]:
        """Jobs that ended since it was last asked."""

    def stop(self) -> None:
        """Asks all jobs to save and end, and waits until they have."""


class Step(Protocol):
    """A job, once what it needs is done."""

    @property
    def name(self) -> str:
        """Of its job."""

    @property
    def needs(self) -> set[str]:
        """Names of steps; one that is not among those to be done is done already."""

    def begin(self) -> Job | None:
        """What is to be run; `None` where nothing is left to do."""

    def end(self, end: End) -> bool:
        """Notes what came of it; whether it went well."""


def work_off(steps: Sequence[Step], backend: Backend) -> None:
    """Gives steps to a backend, each one after those that it needs.

    One that fails stops only those that need it. At a signal to stop, all jobs save first.
    """
    waiting, going = list(steps), dict[str, Step]()
    undone = {step.name for step in steps}
    former = {s: signal.signal(s, _leave) for s in stop_signals() if s != signal.SIGINT}
    try:
        while waiting or going:
            while backend.has_room() and (step := _first_ready(waiting, undone)) is not None:
                waiting.remove(step)
                job = step.begin()
                if job is None:
                    undone.remove(step.name)
                    continue
                backend.start(job)
                going[step.name] = step
                complain(f"{step.name}: {backend.taken}")
            if not going:
                if waiting:
                    names = ", ".join(step.name for step in waiting)
                    complain(f"{names}: needs a run that failed")
                break
            time.sleep(backend.poll_seconds)
            for job, end in backend.ended():
                if going.pop(job.name).end(end):
                    undone.remove(job.name)
    finally:
        backend.stop()  # jobs save a checkpoint, to go on from next time
        for number, handler in former.items():
            signal.signal(number, handler)


def _first_ready(waiting: Sequence[Step], undone: set[str]) -> Step | None:
    return next((step for step in waiting if not step.needs & undone), None)


def _leave(number: int, _frame: Any) -> None:
    sys.exit(128 + number)
