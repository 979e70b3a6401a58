"""Files that anyone may have made: only regular ones are read, and only up to a limit."""

import os
import stat
from pathlib import Path

from deepmoe.errors import reason

MOST_BYTES = 2**28  # of an image file, as it is or unpacked from a zip


class Unreadable(Exception):
    """A file that can't be used; the message says why, in a few words."""


def read_file(path: str | Path, limit: int = MOST_BYTES) -> bytes:
    """The content of a regular file; anything else could block, or never end.

    Raises:
        Unreadable: where there is no such file, or it is of another kind or too large.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("not a regular file")
            check_length(status.st_size, limit)
            return file.read(status.st_size)
    except (OSError, ValueError) as error:  # ValueError: a path that holds a zero byte
        raise Unreadable(reason(error)) from error


def check_length(length: int, limit: int) -> None:
    """Refuses a file of more than `limit` bytes before memory is taken for it."""
    if length > limit:
        raise Unreadable(f"{length:,} bytes are more than the {limit:,} that are read")


def _without_waiting(path: str, flags: int) -> int:
    # A pipe would otherwise keep this process until somebody writes into it.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
