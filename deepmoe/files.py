"""Files that are there whole, or not at all; folders that one process has to itself."""

import contextlib
import errno
import os
import platform
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from deepmoe.drafts import drafted
from deepmoe.errors import UserError

MOST_BYTES = 2**28  # of a file that is read whole
LOCK_NAME = ".lock"
_OURS: set[Path] = set()  # folders that this process has to itself


def read_regular(path: str | Path, limit: int = MOST_BYTES) -> bytes:
    """The content of a regular file; anything else could block, or never end.

    Raises:
        OSError: where there is no such file, or it is of another kind or too large.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            if status.st_size > limit:
                raise OSError(errno.EFBIG, too_long(status.st_size, limit), str(path))
            return file.read(status.st_size)
    except ValueError as error:  # a path that holds a zero byte
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def too_long(length: int, limit: int) -> str:
    """What is told of a file that is refused before memory is taken for it."""
    return f"{length:,} bytes are more than the {limit:,} that are read"


def _without_waiting(path: str, flags: int) -> int:
    # A pipe would otherwise keep this process until somebody writes into it.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file in one step, after the new content has reached the disk."""
    try:
        if path.exists() and not path.is_file():  # /dev/null must not become a file
            raise OSError(errno.EINVAL, "not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with drafted(path, content) as draft:
            draft.replace(path)
    except (OSError, ValueError) as error:
        kept = "; the file before it is whole" if path.exists() else ""
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {reason}{kept}") from error


def write_together(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes several files into a folder: all of them, or (where one can't be) none."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in contents:
            if (folder / name).is_dir():
                raise IsADirectoryError(None, f"{name} is a folder")
        with contextlib.ExitStack() as stack:
            drafts = {
                folder / name: stack.enter_context(drafted(folder / name, content))
                for name, content in contents.items()
            }
            for path, draft in drafts.items():
                draft.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            if made:
                folder.rmdir()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to {folder}: {reason}") from error


def is_newer(path: Path, than: Path) -> bool:
    """Whether both are there, one written after the other: what it holds is still of that."""
    try:
        return path.stat().st_mtime_ns > than.stat().st_mtime_ns
    except FileNotFoundError:  # of either: what is there is of nothing that is
        return False


def check_writable(path: Path) -> None:
    """Refuses a place that nothing can be written to, before work is spent on what to write.

    Raises:
        UserError: where a folder on the way is a file, or closed to this process.
    """
    try:
        whole = path.absolute()
        on_the_way = (*whole.parents, whole)  # the root has no parents
        there = next(p for p in on_the_way if p.exists() or p.is_symlink())
        if not there.is_dir():
            raise UserError(f"cannot write {path}: {there} is not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"cannot write {path}: {there} is not writable")
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        ) from error


def check_replaceable(path: Path, start: bytes) -> None:
    """Refuses a place for a file that can't be written, or that holds somebody else's.

    Args:
        path: of the file.
        start: what files of its kind begin with, and others don't.

    Raises:
        UserError: before work is spent on what to write.
    """
    check_writable(path)
    try:
        there = read_regular(path) if path.exists() else b""
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    if there and not there.startswith(start):
        raise UserError(f"{path} is there already, and holds something else: choose another file")


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps other processes that ask for it out of a folder, until the end or this one's death.

    Raises:
        UserError: while another process has the folder; it says which one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        if folder in _OURS:  # locks are for other processes
            raise UserError(f"{folder} is in use by this process")
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        holder = _lock(handle)
        if holder is not None:
            raise UserError(f"{folder} is in use by {holder}")
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        except OSError as error:  # a full disk, or what is no file
            raise UserError(f"cannot write {folder / LOCK_NAME}: {error.strerror}") from error
        _OURS.add(folder)
        yield
    finally:
        _OURS.discard(folder)
        os.close(handle)  # which also gives the lock back


def user_of(folder: Path) -> str | None:
    """Which process has a folder to itself, in words; `None` if nobody has."""
    try:
        handle = os.open(folder / LOCK_NAME, os.O_RDWR)
    except OSError:
        return None
    try:
        return _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> str | None:
    """Locks a file for this process, or tells which one has it.

    A lock of this kind belongs to one process: children don't inherit it, so that it is gone with
    the process itself, whatever it leaves running.
    """
    if sys.platform == "win32":  # has no locks of this kind
        return None
    import fcntl

    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return os.pread(handle, 100, 0).decode("utf-8", "replace") or "another process"
    except OSError:  # some network file systems have no locks
        return None
    return None
