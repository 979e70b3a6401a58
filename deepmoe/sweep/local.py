"""Jobs by processes of this machine that stay for the next one, or one by one in this process."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deepmoe.console import complain
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.launch import threads
from deepmoe.sweep.schedule import POLL_SECONDS, End, Job


class Worker:
    """A process that runs one `deepmoe` command after the other: starting one takes seconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deepmoe.cli.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # A Ctrl-C is for this process alone: it asks the runs to stop, once, and they save.
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": threads()},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)

    @property
    def alive(self) -> bool:
        """Whether it could take a command: it may have been killed."""
        return self._process.poll() is None

    def begin(self, arguments: Sequence[str], log: Path) -> None:
        """Starts a command, whose output is added to a file."""
        with contextlib.suppress(BrokenPipeError):  # it was killed just now: `code` tells
            self._commands.write(json.dumps([list(arguments), str(log)]).encode() + b"\n")

    def code(self) -> int | None:
        """The exit code of the command, `None` while it runs; that of a process that was killed."""
        ended = self._process.poll()  # asked first: what it says last is then there to be read
        told = self._answers.read()
        return int(told) if told else ended

    def terminate(self) -> None:
        """Asks it to end, which makes a run save.

        A run that is just about to end does so as if nobody had asked: there is no next one.
        """
        self._process.terminate()
        self._commands.close()

    def wait(self) -> None:
        """Waits until it has ended."""
        self._process.wait()
        self._commands.close()
        self._answers.close()


class LocalProcesses:
    """Runs so many jobs side by side."""

    taken = "started"
    poll_seconds = POLL_SECONDS

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._going: list[tuple[Job, Worker]] = []
        self._idle: list[Worker] = []
        self._refused: list[tuple[Job, End]] = []

    def has_room(self) -> bool:
        """Whether fewer jobs run than are allowed."""
        return len(self._going) < self._jobs

    def start(self, job: Job) -> None:
        """Hands a job to a process that has none; one whose log can't be written fails alone."""
        try:
            job.log.open("ab").close()
        except OSError as error:
            complain(f"cannot write {job.log}: {error.strerror}")
            self._refused.append((job, End(UserError.exit_code)))
            return
        worker = self._idle_worker() or Worker()
        worker.begin(job.arguments, job.log)
        self._going.append((job, worker))

    def _idle_worker(self) -> Worker | None:
        """One that is there still: others may have been killed for their memory."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.wait()
        return None

    def ended(self) -> list[tuple[Job, End]]:
        """Jobs that have ended. A process whose job has failed is not used again."""
        ended, self._refused = self._refused, []
        for job, worker in list(self._going):
            code = worker.code()
            if code is None:
                continue
            self._going.remove((job, worker))
            ended.append((job, End(code)))
            if code:
                worker.wait()
            else:
                self._idle.append(worker)
        return ended

    def stop(self) -> None:
        """Asks all processes to end, which makes runs save, and waits for them."""
        workers = [*(worker for _, worker in self._going), *self._idle]
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


class ThisProcess:
    """Runs one job after the other, without a process for each: for runs of a second."""

    taken = "run here"
    poll_seconds = 0.0

    def __init__(self) -> None:
        self._ended: list[tuple[Job, End]] = []

    def has_room(self) -> bool:
        """Whether what became of the last job has been asked."""
        return not self._ended

    def start(self, job: Job) -> None:
        """Runs a job to its end; a mistake is noted in its log, as its own process would."""
        try:
            job.call()
            end = End(0)
        except TrainingInterrupted as error:  # a wish to stop is for all of them
            raise error.resumed_by("the same command") from error
        except UserError as error:
            with job.log.open("a", encoding="utf-8") as log:
                log.write(f"Error: {error}\n")
            end = End(error.exit_code)
        self._ended.append((job, end))

    def ended(self) -> list[tuple[Job, End]]:
        """The job that was run last."""
        ended, self._ended = self._ended, []
        return ended

    def stop(self) -> None:
        """Nothing runs on."""
