"""A folder of files, or a zip file of it, behind one interface."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile, is_zipfile

from deepmoe.errors import UserError


class FileTree:
    """The files of a folder or of a zip file; names are relative, with forward slashes.

    Can be pickled, and read from in several processes at once.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = ""  # of outer folders that were passed over, with a slash at the end
        self._is_folder = root.is_dir()
        self._opened: tuple[int, ZipFile] | None = None

    @classmethod
    def open(cls, root: str | Path, *expected: str) -> "FileTree":
        """Opens a folder or a zip file.

        Args:
            root: its path.
            expected: folders of which one should lie at the top. As long as none does, a single
                outer folder is passed over: many archives wrap their content into one.

        Raises:
            UserError: where there is nothing at `root`, or something else.
        """
        path = Path(root).expanduser()
        if not path.exists():
            raise UserError(f"{path} does not exist; set data.root to a folder or a zip file of it")
        if not path.is_dir() and not is_zipfile(path):
            raise UserError(f"{path} is neither a folder nor a zip file")
        tree = cls(path)
        folders = tree.folders()
        while expected and len(folders) == 1 and folders[0] not in expected:
            tree._prefix += folders[0] + "/"
            folders = tree.folders()
        return tree

    def names(self) -> list[str]:
        """All files, sorted; hidden ones and those that macOS adds to a zip file are left out."""
        found = _walk(self.root / self._prefix) if self._is_folder else self._entries()
        return sorted({n for n in found if n and not n.endswith("/") and not _is_hidden(n)})

    def folders(self, under: str = "") -> list[str]:
        """Names of the folders that lie directly in the folder `under`, empty ones included."""
        if self._is_folder:
            inside = self.root / self._prefix / under
            found = set(next(_list(inside))[1]) if inside.is_dir() else set()
        else:
            start = under + "/" if under else ""
            within = (n.removeprefix(start) for n in self._entries() if n.startswith(start))
            found = {name.split("/")[0] for name in within if "/" in name}
        return sorted(name for name in found if name and not _is_hidden(name))

    def read(self, name: str) -> bytes:
        """A file's content.

        Raises:
            OSError: where it can't be read, for whatever reason.
        """
        if self._is_folder:
            return (self.root / self._prefix / name).read_bytes()
        try:
            return self._zip().read(self._prefix + name)
        except (BadZipFile, zlib.error, EOFError) as error:
            raise OSError(f"damaged in the zip file ({error})") from error
        except (RuntimeError, KeyError) as error:  # encrypted, or packed in an unknown way; missing
            raise OSError(str(error.args[0] if error.args else error)) from error

    def _entries(self) -> Iterator[str]:
        names = self._zip().namelist()
        return (n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix))

    def _zip(self) -> ZipFile:
        # One for each process: forked ones would share, and move, one position in the file.
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = os.getpid(), ZipFile(self.root)
            except (OSError, BadZipFile) as error:
                raise UserError(f"cannot open {self.root}: {error}") from error
        return self._opened[1]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_opened": None}


def _list(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    def fail(error: OSError) -> None:
        raise UserError(f"cannot list {error.filename}: {error.strerror}") from error

    # Links are followed because big data sets often lie elsewhere, with only a link at hand.
    return os.walk(root, onerror=fail, followlinks=True)


def _walk(root: Path) -> Iterator[str]:
    for folder, _, files in _list(root):
        inside = Path(folder).relative_to(root).as_posix()
        yield from (file if inside == "." else f"{inside}/{file}" for file in files)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
