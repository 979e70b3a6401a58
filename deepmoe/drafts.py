"""Files in the making: each writer has one of its own, and what killed writers leave is used up."""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST = 200  # bytes of a name that more can be added to: most systems have 255
MOST = 100  # writers of one file at the same time
# A link is not followed, and a pipe keeps nobody waiting.
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_IN_THE_WAY = (
    errno.ELOOP,
    errno.EISDIR,
    errno.EACCES,
    errno.ENXIO,
)  # links, folders, others' files


@contextlib.contextmanager
def drafted(path: Path, content: bytes) -> Iterator[Path]:
    """New content of a file, on the disk under another name: to be renamed, or else gone again.

    Raises:
        OSError: where it can't be written.
    """
    found = _numbered(path)
    draft, handle = found or _random(path)
    with open(handle, "wb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(handle)
            if found is None:  # some systems rename no open file, and there is no lock to hold
                file.close()
            yield draft
        finally:
            # Once it is renamed, another writer may have a numbered draft of the same name.
            if found is None or _stands_at(draft, handle):
                with contextlib.suppress(OSError):
                    draft.unlink()


def _numbered(path: Path) -> tuple[Path, int] | None:
    """An empty, locked file beside another one, open for writing; `None` where locks are unknown.

    The lock tells drafts that are being written from those of writers that were killed: the next
    writer takes these, so that they never pile up.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    error = OSError(errno.EBUSY, "too many others write it")
    for number in range(MOST):
        draft = path.with_name(f"{_stem(path)}.{number}.tmp")
        try:
            handle = os.open(draft, os.O_RDWR | os.O_CREAT | _AS_IT_IS, 0o666)
        except OSError as told:
            if told.errno not in _IN_THE_WAY:
                raise
            error = told
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _stands_at(draft, handle):
                os.ftruncate(handle, 0)
                return draft, handle
        except BlockingIOError:  # somebody writes it
            pass
        except OSError:  # some network file systems have no locks
            os.close(handle)
            draft.unlink(missing_ok=True)  # nobody has such a draft there
            return None
        os.close(handle)
    raise error


def _random(path: Path) -> tuple[Path, int]:
    """An empty file under a name that nobody else takes, open for writing."""
    draft = path.with_name(f"{_stem(path)}.{secrets.token_hex(8)}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return draft, os.open(draft, flags, 0o666)


def _stem(path: Path) -> str:
    """What drafts of a file are called; a long name has no room for more."""
    name = os.fsencode(path.name)
    return path.name if len(name) <= LONGEST else hashlib.blake2b(name, digest_size=16).hexdigest()


def _stands_at(draft: Path, handle: int) -> bool:
    """Whether an open file is a plain one of this name alone: not renamed, nor a link's end."""
    status = os.fstat(handle)
    try:
        there = os.lstat(draft)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and os.path.samestat(status, there)
