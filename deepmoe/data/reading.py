"""Files that anyone may have made: only regular ones are read, and only up to a limit."""

from pathlib import Path

from deepmoe.errors import reason
from deepmoe.files import MOST_BYTES, read_regular, too_long


class Unreadable(Exception):
    """A file that can't be used; the message says why, in a few words."""


def read_file(path: str | Path, limit: int = MOST_BYTES) -> bytes:
    """The content of a regular file; anything else could block, or never end.

    Raises:
        Unreadable: where there is no such file, or it is of another kind or too large.
    """
    try:
        return read_regular(path, limit)
    except OSError as error:
        raise Unreadable(reason(error)) from error


def check_length(length: int, limit: int) -> None:
    """Refuses a file of more than `limit` bytes before memory is taken for it."""
    if length > limit:
        raise Unreadable(too_long(length, limit))
