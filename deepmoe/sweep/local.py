"""Jobs as processes of this machine."""

import subprocess

from deepmoe import launch
from deepmoe.sweep.schedule import End, Job


class LocalProcesses:
    """Runs so many jobs side by side."""

    taken = "started"

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
