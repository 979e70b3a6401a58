"""SIGTERM, SIGINT and SIGHUP as a wish to stop at the next batch."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from deepmoe.data import Batch, Loader

# Whoever ends a job often sends the same signal twice at once: `timeout` does, to the process and
# to its group. A person who insists takes longer.
ONE_WISH_SECONDS = 2.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask to stop; among them, that a terminal was closed, unless under nohup."""
    asked = (signal.SIGTERM, signal.SIGINT)
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return asked
    return (*asked, signal.SIGHUP)


class Interrupts:
    """While entered, notes signals instead of dying of them; one that comes later acts as usual."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._former = {s: signal.signal(s, self._note) for s in stop_signals()}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
        elif now - self._received_at > ONE_WISH_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Stopped(Exception):
    """A wish to stop came while images were gone through."""


class UntilStopped:
    """Images of a loader, until there is a wish to stop."""

    def __init__(self, loader: Loader, check_wish: Callable[[], None]) -> None:
        self.loader, self.check_wish = loader, check_wish
        self.images = loader.images

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.check_wish()
            yield batch
