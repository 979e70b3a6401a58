"""A folder of files, or a zip of it, behind one interface."""

import os
import zipfile
from pathlib import Path
from typing import Any

from deepmoe.errors import UserError


class FileTree:
    """The files under a folder or in a zip, by posix name relative to it.

    It can be pickled, and used in forked processes: each opens the zip for itself.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._is_zip = root.is_file()
        self._archive: tuple[int, zipfile.ZipFile] | None = None

    @classmethod
    def open(cls, root: str | Path) -> "FileTree":
        """Opens a folder or a zip.

        Raises:
            UserError: where there is neither.
        """
        path = Path(root).expanduser()
        if not path.exists():
            raise UserError(f"{path} does not exist; set data.root to a folder of images or a zip")
        tree = cls(path)
        if not path.is_dir():
            try:
                tree._zip()
            except (zipfile.BadZipFile, OSError) as error:
                raise UserError(f"{path} is neither a folder nor a readable zip") from error
        return tree

    def names(self) -> list[str]:
        """Every file, sorted; hidden ones and what macOS adds to zips are left out."""
        if self._is_zip:
            names = [name for name in self._zip().namelist() if not name.endswith("/")]
        else:
            # Big data sets are often linked into place, so links are followed.
            names = [
                Path(folder, file).relative_to(self.root).as_posix()
                for folder, _, files in os.walk(self.root, followlinks=True)
                for file in files
            ]
        return sorted(name for name in names if not _is_hidden(name))

    def read(self, name: str) -> bytes:
        """The content of one file."""
        return self._zip().read(name) if self._is_zip else (self.root / name).read_bytes()

    def _zip(self) -> zipfile.ZipFile:
        # A forked process inherits the open file, but must not share its position.
        if self._archive is None or self._archive[0] != os.getpid():
            self._archive = (os.getpid(), zipfile.ZipFile(self.root))
        return self._archive[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_archive": None}


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
