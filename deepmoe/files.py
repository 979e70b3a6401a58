"""Files that are there whole, or not at all; folders that one process has to itself."""

import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from deepmoe.errors import UserError

LOCK_NAME = ".lock"
_OURS: set[Path] = set()  # folders that this process has to itself


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file in one step, after the new content has reached the disk."""
    draft = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink()
        kept = "; the file before it is whole" if path.exists() else ""
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {reason}{kept}") from error


def write_together(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes several files into a folder: all of them, or (where one can't be) none."""
    made = not folder.exists()
    drafts = {folder / name: folder / f"{name}.tmp" for name in contents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in drafts:
            if path.is_dir():
                raise IsADirectoryError(None, f"{path.name} is a folder")
        for draft, content in zip(drafts.values(), contents.values(), strict=True):
            draft.write_bytes(content)
        for path, draft in drafts.items():
            draft.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
            if made:
                folder.rmdir()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to {folder}: {reason}") from error


def check_writable(path: Path) -> None:
    """Refuses a place that nothing can be written to, before work is spent on what to write.

    Raises:
        UserError: where a folder on the way is a file, or closed to this process.
    """
    try:
        there = next(parent for parent in path.absolute().parents if parent.exists())
        if not there.is_dir():
            raise UserError(f"cannot write {path}: {there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"cannot write {path}: {there} is not writable")
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        ) from error


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
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
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
