"""Worker processes that leave signals to the main process, and end when it does."""

import atexit
import contextlib
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from deepmoe.errors import UserError, reason

# What `timeout`, SLURM, systemd, a closed terminal and Ctrl-C send to a whole group of processes.
STOP_SIGNALS = {
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
}
_WORKERS: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()


def load_batches(loader: DataLoader) -> Iterator[Any]:
    """Iterates over a loader, whose `worker_init_fn` is `ignore_signals`.

    Raises:
        UserError: where its processes can't be started, or one of them dies.
    """
    if not loader.num_workers:
        yield from loader
        return
    try:
        yield from _start(loader)
    except (RuntimeError, OSError, EOFError) as error:  # a dead process is met in several ways
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
            raise
        raise UserError(
            f"a process that decodes images was killed ({reason(error)}): "
            "where memory or /dev/shm is short, set data.workers lower"
        ) from error


def ignore_signals(_worker: int) -> None:
    """Leaves the decision to the main process, which may need some more images to stop well."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _start(loader: DataLoader) -> Any:
    try:
        with _signals_blocked(), _handler_of_children_kept():
            batches: Any = iter(loader)
    except OSError as error:
        raise UserError(
            f"cannot start {loader.num_workers} processes that decode images "
            f"({reason(error)}): set data.workers lower"
        ) from error
    _WORKERS.update(batches._workers)
    _end_workers_at_exit()
    return batches


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Makes signals wait: for this process, and for new ones until they ignore them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _handler_of_children_kept() -> Iterator[None]:
    """Undoes PyTorch's: it would raise an error wherever this process just is when a worker dies.

    A dead worker is found without it, when the next batch of it is due.
    """
    in_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    before = signal.getsignal(signal.SIGCHLD) if in_main and hasattr(signal, "SIGCHLD") else None
    yield
    if before is not None:
        signal.signal(signal.SIGCHLD, before)


@cache
def _end_workers_at_exit() -> None:
    """Ends workers before multiprocessing sends them SIGTERM, and waits for them for ever."""

    @atexit.register
    def end() -> None:
        for worker in list(_WORKERS):
            with contextlib.suppress(AssertionError, ValueError):  # of another process; closed
                worker.kill()
