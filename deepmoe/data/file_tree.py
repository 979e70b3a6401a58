"""A folder of files, or a zip file of it, behind one interface."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, is_zipfile

from deepmoe.data.reading import MOST_BYTES, Unreadable, check_length, read_file
from deepmoe.errors import UserError, reason

MOST_OUTER_FOLDERS = 8  # around the content of an archive


class FileTree:
    """The files of a folder or of a zip file; names are relative, with forward slashes.

    Hidden files and folders, and those that macOS adds to a zip file, are left out. Can be pickled,
    and read from in several processes at once.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = ""  # of outer folders that were passed over, with a slash at the end
        self._is_folder = os.path.isdir(root)
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
        path = Path(os.path.expanduser(root))
        if not os.path.exists(path):
            raise UserError(f"{path} does not exist; set data.root to a folder or a zip file of it")
        tree = cls(path)
        if not tree._is_folder:
            # Of a regular file only: others could keep this process waiting.
            if not os.path.isfile(path) or not is_zipfile(path):
                raise UserError(f"{path} is neither a folder nor a zip file")
            try:
                tree._check_entries()
            except Unreadable as error:
                raise UserError(f"cannot open {path}: {error}") from error
        for _ in range(MOST_OUTER_FOLDERS if expected else 0):
            folders = tree.folders()
            if len(folders) != 1 or folders[0] in expected:
                break
            tree._prefix += folders[0] + "/"
        return tree

    def names(self, under: str = "") -> list[str]:
        """All files in the folder `under` and its folders, sorted; none where it is missing.

        Raises:
            UserError: where a folder is reached twice, by a link.
        """
        if self._is_folder:
            return sorted(self._walk(under))
        return sorted(n for n in self._entries(under) if not n.endswith("/"))

    def folders(self, under: str = "") -> list[str]:
        """Names of the folders that lie directly in the folder `under`, empty ones included."""
        if self._is_folder:
            place = self._place(under)
            found = _list(place)[0] if os.path.isdir(place.path) else []
            return [os.path.basename(folder.path) for folder in found]
        start = len(under) + 1 if under else 0
        within = (name[start:] for name in self._entries(under))
        return sorted({name.split("/")[0] for name in within if "/" in name})

    def has(self, name: str) -> bool:
        """Whether there is a file, or at least something, of this name."""
        if self._is_folder:
            return os.path.lexists(self.root / self._prefix / name)
        return self._prefix + name in self._zip().NameToInfo

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:
        """A file's content.

        Raises:
            Unreadable: where it can't be read, for whatever reason, or is longer than `limit`.
        """
        if self._is_folder:
            return read_file(self.root / self._prefix / name, limit)
        return _unpack(self._zip(), self._prefix + name, limit)

    def _place(self, under: str) -> "_Place":
        top = _Place("", str(self.root), os.path.realpath(self.root))
        for part in Path(self._prefix).parts:
            top = top.child(part, is_link=True)
        place = top._replace(name="")
        for part in Path(under).parts:
            place = place.child(part, is_link=True)
        return place

    def _walk(self, under: str) -> Iterator[str]:
        top = self._place(under)
        if not os.path.isdir(top.path):
            return
        reached = {top.real: top.name}
        waiting = [top]
        while waiting:  # not recursive: folders may lie very deep
            folders, files = _list(waiting.pop())
            yield from files
            for folder in folders:
                if folder.real in reached:
                    raise UserError(
                        f"{reached[folder.real]} and {folder.name} in {self.root} are the same "
                        "folder, so its files would count twice: remove one of the links"
                    )
                reached[folder.real] = folder.name
            waiting += reversed(folders)

    def _entries(self, under: str) -> Iterator[str]:
        start = self._prefix + (under + "/" if under else "")
        names = (
            n.removeprefix(self._prefix) for n in self._zip().namelist() if n.startswith(start)
        )
        return (n for n in names if n and not _is_hidden(n))

    def _check_entries(self) -> None:
        archive = self._zip()
        seen = set()
        for name in archive.namelist():
            parts = name.removesuffix("/").split("/")
            if "\\" in name or not {"", ".", ".."}.isdisjoint(parts):
                raise Unreadable(f"it holds the name {name[:100]!r}, so it must be packed anew")
            if name in seen:
                raise Unreadable(f"it holds two files of the name {name[:100]!r}")
            seen.add(name)

    def _zip(self) -> ZipFile:
        # One for each process: forked ones would share, and move, one position in the file.
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = os.getpid(), ZipFile(self.root)
            except Exception as error:  # a damaged one can fail in any way
                raise Unreadable(f"the zip file is damaged ({reason(error)})") from error
        return self._opened[1]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_opened": None}


def _unpack(archive: ZipFile, name: str, limit: int) -> bytes:
    """A file of a zip, of whose length and kind nothing is believed."""
    try:
        entry = archive.getinfo(name)
        if entry.flag_bits & 1:
            raise Unreadable("encrypted in the zip file")
        if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            # The others can't be unpacked up to a limit only.
            raise Unreadable("packed in an unusual way; a zip file should be stored or deflated")
        check_length(entry.file_size, limit)
        with archive.open(entry) as file:
            content = file.read(entry.file_size)
    except Unreadable:
        raise
    except KeyError:
        raise Unreadable("not in the zip file") from None
    except Exception as error:  # a damaged one can fail in any way
        raise Unreadable(f"damaged in the zip file ({reason(error)})") from error
    if len(content) != entry.file_size:
        raise Unreadable("damaged in the zip file (it is shorter than it should be)")
    return content


class _Place(NamedTuple):
    """A folder on the way down a tree."""

    name: str  # relative to the tree
    path: str
    real: str  # the path without links
    above: tuple[str, ...] = ()  # the real paths of the folders on the way to it

    def child(self, name: str, is_link: bool) -> "_Place":
        path = os.path.join(self.path, name)
        real = os.path.realpath(path) if is_link else os.path.join(self.real, name)
        return _Place(self.join(name), path, real, (*self.above, self.real))

    def join(self, name: str) -> str:
        return f"{self.name}/{name}" if self.name else name

    def lies_in(self, real: str) -> bool:
        return real == self.real or real in self.above or Path(self.real).is_relative_to(real)


def _list(place: _Place) -> tuple[list[_Place], list[str]]:
    """The folders and the files directly in a folder, sorted, without hidden ones."""
    folders, files = [], []
    try:
        with os.scandir(place.path) as entries:
            found = sorted((e for e in entries if not _is_hidden(e.name)), key=lambda e: e.name)
    except OSError as error:
        raise UserError(f"cannot list {place.path}: {error.strerror}") from error
    for entry in found:
        # Links are followed because big data sets often lie elsewhere, with only a link at hand.
        is_link = entry.is_symlink()
        if not (os.path.isdir(entry.path) if is_link else entry.is_dir()):
            files.append(place.join(entry.name))
            continue
        folder = place.child(entry.name, is_link)
        if not (is_link and place.lies_in(folder.real)):  # it would be gone through for ever
            folders.append(folder)
    return folders, files


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
