"""Whether other processes hold the cores: threads that wait for each other make everything slow."""

import os
import time
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")  # of Linux: elsewhere nothing is known, and nothing said
BUSY = (1, 2, 3, 6, 7, 8)  # user, nice, system, irq, softirq, steal; in a line of /proc/stat
MATTERS = 0.5  # cores of others from which on it is worth a word


class BusyCores:
    """How many of the cores that this process may use are busy with other processes.

    Args:
        clock: seconds.
        read: busy seconds of these cores so far, and those of this process with its children;
            `None` where that is not known.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[], tuple[float, float] | None] | None = None,
    ) -> None:
        self.clock = clock
        self.read = read or _busy_seconds
        self.count = len(_own_cores())
        self._last = (clock(), self.read())

    def others(self) -> float | None:
        """Cores that others kept busy since the last look, on average."""
        (then, before), (now, after) = self._last, (self.clock(), self.read())
        self._last = (now, after)
        if before is None or after is None or now <= then:
            return None
        busy, own = after[0] - before[0], after[1] - before[1]
        return max(0.0, min((busy - own) / (now - then), float(self.count)))


def thread_hint(others: float, cores: int, threads: int) -> str | None:
    """What to set where others hold cores that this process's threads wait for."""
    free = max(1, round(cores - others))
    if others < MATTERS or threads <= free:
        return None
    return (
        f"Hint: other processes keep {others:.1f} of {cores} cores busy, and {threads} threads "
        f"here wait for each other: start it with OMP_NUM_THREADS={free}, which can be many times "
        "as fast"
    )


def _own_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _busy_seconds() -> tuple[float, float] | None:
    try:
        ticks, names = os.sysconf("SC_CLK_TCK"), {f"cpu{core}" for core in _own_cores()}
        lines = map(str.split, (PROC / "stat").read_text().splitlines())
        busy = sum(int(line[i]) for line in lines if line and line[0] in names for i in BUSY)
        own = sum(os.times()[:4])  # children that have ended are counted in
        for file in (PROC / "self" / "task").glob("*/children"):
            for child in file.read_text().split():
                own += _seconds_of(child, ticks)
    except (OSError, ValueError, IndexError):
        return None
    return busy / ticks, own


def _seconds_of(process: str, ticks: int) -> float:
    try:
        told = (PROC / process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(told[11]) + int(told[12])) / ticks
