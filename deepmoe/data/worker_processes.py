"""Worker processes that leave signals to the main process, and end when it does."""

import atexit
import contextlib
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from deepmoe.data.reading import reason
from deepmoe.errors import UserError

# What `timeout`, SLURM, systemd, a closed terminal and Ctrl-C send to a whole group of processes.
STOP_SIGNALS = {
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
}
_STARTED: "weakref.WeakSet[Any]" = weakref.WeakSet()


def start_workers(loader: DataLoader) -> Iterator[Any]:
    """Iterates over a loader, whose `worker_init_fn` is `ignore_signals`.

    Raises:
        UserError: where its processes can't be started, or one of them dies.
    """
    if not loader.num_workers:
        yield from loader
        return
    with _signals_blocked():
        try:
            batches = iter(loader)
        except OSError as error:
            raise UserError(
                f"cannot start {loader.num_workers} processes that decode images "
                f"({reason(error)}): set data.workers lower"
            ) from error
        _translate_deaths()
    _STARTED.add(batches)
    _end_workers_at_exit()
    try:
        yield from batches
    except RuntimeError as error:
        raise _translated(error) from error


def ignore_signals(_worker: int) -> None:
    """Leaves the decision to the main process, which may need some more images to stop well."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked())


def _blocked() -> set[signal.Signals]:
    return STOP_SIGNALS | {signal.SIGCHLD}


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Makes signals wait, for this process and for those that it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _blocked())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def _end_workers_at_exit() -> None:
    """Has workers told to end: multiprocessing would send SIGTERM, and wait for ever."""

    @atexit.register
    def end() -> None:
        for batches in list(_STARTED):
            batches._shutdown_workers()


class _Deaths:
    """PyTorch's handler of ended processes, which raises wherever the main process just is."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.original(number, frame)
        except RuntimeError as error:
            raise _translated(error) from error


def _translate_deaths() -> None:
    # PyTorch sets its handler once, and in the main thread only.
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and not isinstance(handler, _Deaths):
        signal.signal(signal.SIGCHLD, _Deaths(handler))


def _translated(error: RuntimeError) -> Exception:
    if not str(error).startswith("DataLoader worker"):
        return error
    return UserError(
        f"a process that decodes images was killed ({reason(error)}): "
        "where memory is short, set data.workers lower"
    )
