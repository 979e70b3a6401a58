"""Jobs as processes of this machine, or one after the other in this one."""

import subprocess

from deepmoe import launch
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.sweep.schedule import POLL_SECONDS, End, Job


class LocalProcesses:
    """Runs so many jobs side by side."""

    taken = "started"
    poll_seconds = POLL_SECONDS

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._going: list[tuple[Job, subprocess.Popen[bytes]]] = []

    def has_room(self) -> bool:
        """Whether fewer jobs run than are allowed."""
        return len(self._going) < self._jobs

    def start(self, job: Job) -> None:
        """Starts a process."""
        process = launch.launch(job.arguments, job.log, threads=launch.threads())
        self._going.append((job, process))

    def ended(self) -> list[tuple[Job, End]]:
        """Jobs whose processes have ended."""
        ended = [(job, process) for job, process in self._going if process.poll() is not None]
        self._going = [pair for pair in self._going if pair not in ended]
        return [(job, End(process.returncode)) for job, process in ended]

    def stop(self) -> None:
        """Asks all processes to end, which makes runs save, and waits for them."""
        for _, process in self._going:
            process.terminate()
        for _, process in self._going:
            process.wait()


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
        except TrainingInterrupted:  # a wish to stop is for all of them
            raise
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
