"""Files that are there whole, or not at all; folders that one process has to itself."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from deepmoe.errors import UserError


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
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        kept = "; the file before it is whole" if path.exists() else ""
        raise UserError(f"cannot write {path}: {error.strerror}{kept}") from error


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps other processes that ask for it out of a folder, until the end or this one's death.

    Raises:
        UserError: while another process has the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = None if sys.platform == "win32" else os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    if sys.platform == "win32" or handle is None:  # Windows has no locks of this kind
        yield
        return
    import fcntl

    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder} is in use by another process") from error
        except OSError:  # some network file systems have no locks
            pass
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # workers that still run have the handle, too
        os.close(handle)
