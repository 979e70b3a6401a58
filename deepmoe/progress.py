"""How far a command is: a bar on a terminal, a line every few seconds in a log.

`deepmoe` commands and `fit` show it; other calls from Python are silent. It goes to standard error,
so that what is piped holds results alone. Code that takes long says what it does and how far it
is; a thread of its own tells, so that one long step does not keep a log empty.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from deepmoe.busy_cores import BusyCores, thread_hint
from deepmoe.console import complain, make_console, printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

EVERY = 5.0  # seconds between two lines of a log
SWITCH = "DEEPMOE_PROGRESS"  # of the environment: 0 shows nothing
REDRAW = 0.2  # seconds between two looks of a bar
T = TypeVar("T")


class Progress:
    """Something that takes a while.

    Args:
        title: what is done.
        total: how much there is to do; `None` if nobody knows.
        unit: what is counted.
        done: how much of it is done before it starts.
    """

    def __init__(self, title: str, total: int | None = None, unit: str = "", done: int = 0) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self.first = done
        self.note = ""  # figures of what is done so far
        self.started = 0.0

    def advance(self, count: int = 1) -> None:
        """So much more is done."""
        self.done += count

    def told(self, now: float) -> str:
        """The state in words, without the title."""
        parts = []
        if self.total is not None:
            parts.append(f"{self.done:,} of {self.total:,} {self.unit}".rstrip())
        elif self.unit:
            parts.append(f"{self.done:,} {self.unit}")
        elapsed, new = now - self.started, self.done - self.first
        parts += [*([self.note] if self.note else []), _duration(elapsed)]
        if self.total is not None and new > 0 and self.done < self.total:
            parts.append(f"about {_duration(elapsed * (self.total - self.done) / new)} left")
        return ", ".join(parts)


class Display:
    """Tells of everything that is under way.

    Args:
        clock: seconds.
        cores: who uses them.
        terminal: whether to draw bars; else lines are told.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cores: BusyCores | None = None,
        terminal: bool | None = None,
    ) -> None:
        self.clock, self.cores = clock, cores or BusyCores(clock)
        self.terminal = _is_terminal() if terminal is None else terminal
        self.under_way: list[Progress] = []
        self._bars: Bars | None = None
        self._tasks: dict[Progress, TaskID] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._looked_at = clock()
        self._hinted = False

    def begin(self, work: Progress) -> None:
        """Something starts."""
        work.started = self.clock()
        with self._lock:
            self.under_way.append(work)

    def end(self, work: Progress) -> None:
        """It is done, or was given up."""
        with self._lock:
            self.under_way.remove(work)
            if self._bars is not None and work in self._tasks:
                self._bars.remove_task(self._tasks.pop(work))
            if not self.under_way:
                self._stop_bars()

    def start(self) -> None:
        """Lets a thread tell from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._tell_on, daemon=True, name="progress")
            self._thread.start()

    def close(self) -> None:
        """Tells no more."""
        self._ended.set()
        with self._lock:
            self._stop_bars()

    def tell(self) -> None:
        """Tells how far everything is, now."""
        with self._lock:
            if not self.under_way or self._ended.is_set():
                return
            if self.terminal:
                self._draw()
            else:
                *outer, work = self.under_way
                titles = [w.title for w in (*outer[:1], work)]
                complain(f"{', '.join(titles)}: {work.told(self.clock())}")
            self._hint()

    def _tell_on(self) -> None:
        while not self._ended.wait(REDRAW if self.terminal else EVERY):
            self.tell()

    def _hint(self) -> None:
        """One line, once, where other processes hold the cores."""
        if self._hinted or self.clock() - self._looked_at < EVERY:
            return
        self._looked_at, others = self.clock(), self.cores.others()
        hint = None if others is None else thread_hint(others, self.cores.count, _threads())
        if hint is not None:
            self._hinted = True
            complain(hint)

    def _draw(self) -> None:
        if self._bars is None:
            self._bars = _make_bars()
            self._bars.start()
        for work in self.under_way:
            if work not in self._tasks:
                self._tasks[work] = self._bars.add_task("", total=work.total)
            self._bars.update(
                self._tasks[work],
                total=work.total,
                completed=work.done,
                description=printable(f"{work.title}: {work.told(self.clock())}"),
            )
        self._bars.refresh()

    def _stop_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._tasks = None, {}


_DISPLAY: Display | None = None


@contextmanager
def showing(on: bool = True, display: Display | None = None) -> Iterator[None]:
    """Shows progress inside, or does not; where it is shown already, the same display goes on."""
    global _DISPLAY
    before = _DISPLAY
    on = on and (display is not None or os.environ.get(SWITCH) != "0")
    new = on and (before is None or display is not None)
    _DISPLAY = (display or Display()) if new else (before if on else None)
    try:
        yield
    finally:
        if new and _DISPLAY is not None:
            _DISPLAY.close()
        _DISPLAY = before


def is_shown() -> bool:
    """Whether somebody is told: in one process of several."""
    return _DISPLAY is not None and _is_first_process()


@contextmanager
def progress(
    title: str, total: int | None = None, unit: str = "", done: int = 0
) -> Iterator[Progress]:
    """Tells that something is under way, and how far it is; arguments as of `Progress`."""
    work, display = Progress(title, total, unit, done), _DISPLAY
    if display is None or not _is_first_process():
        yield work
        return
    display.begin(work)
    display.start()
    try:
        yield work
    finally:
        display.end(work)


def followed(items: Iterable[T], title: str, total: int | None, unit: str = "") -> Iterator[T]:
    """The items, one after the other, while it is told how many are done."""
    with progress(title, total, unit) as work:
        for item in items:
            yield item
            work.advance()


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _is_first_process() -> bool:
    if "torch" not in sys.modules:  # which is slow to import, and not needed to wait for a file
        return True
    from deepmoe.processes import is_first_process

    return is_first_process()


def _threads() -> int:
    if "torch" not in sys.modules:
        return 1
    import torch

    return torch.get_num_threads()


def _make_bars() -> "Bars":
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    return Bars(
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
        console=make_console(stderr=True),
        transient=True,
        auto_refresh=False,
        # Else it would end where the bar goes, and not where it was sent.
        redirect_stdout=sys.stdout.isatty(),
    )
