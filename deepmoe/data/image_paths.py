"""Which image files are meant by a path: a file, a folder of them, or a pattern."""

import glob
import os
from collections.abc import Callable, Collection
from pathlib import Path

from deepmoe.errors import UserError

# Of what FORMATS of the decoder are called; files that are named one by one may be called anything.
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")


def image_files(given: str | Path, without: Collection[Path] = ()) -> list[Path]:
    """The files that a path stands for, sorted.

    Args:
        given: a file; a folder, whose images are meant at any depth; or a pattern with `*`, `?`
            or `[...]`, where `**` stands for any folders.
        without: folders that are left out.

    Raises:
        UserError: for a folder without images, or a pattern that fits nothing.
    """
    path = Path(given)
    if _is_there(path, os.path.isdir):
        found = _below(path, [folder.resolve() for folder in without])
        if not found:
            raise UserError(f"there are no images in {path}: they end in {', '.join(ENDINGS)}")
        return found
    if glob.has_magic(str(given)) and not _is_there(path, os.path.lexists):
        found = [Path(name) for name in sorted(glob.glob(str(given), recursive=True))]
        found = [name for name in found if name.is_file()]
        if not found:
            raise UserError(f"no file matches {given}")
        return found
    return [path]


def _below(folder: Path, without: list[Path]) -> list[Path]:
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if Path(place, n).resolve() not in without]
        found += [Path(place, n) for n in names if n.lower().endswith(ENDINGS)]
    return sorted(found)


def _is_there(path: Path, check: Callable[[Path], bool]) -> bool:
    try:
        return check(path)
    except ValueError:  # a name that no file can have
        return False
