"""Files that are there whole, or not at all."""

import contextlib
import os
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
