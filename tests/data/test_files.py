"""Folders and zip files look alike."""

import os
import pickle
import zipfile
from multiprocessing import get_context
from pathlib import Path

import pytest

from deepmoe.data.files import FileTree
from deepmoe.errors import UserError

CONTENT = {"b/two.txt": b"2", "a/one.txt": b"1", "a/deep/er.txt": b"deep", "top.txt": b"top"}
UNSEEN = {".hidden": b"", "a/.cache/x.txt": b"", "__MACOSX/a/one.txt": b""}


def write_folder(root: Path) -> Path:
    for name, content in (CONTENT | UNSEEN).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "empty").mkdir()
    return root


def write_zip(path: Path, outer: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if outer:
            archive.writestr(outer, b"")
        archive.writestr(outer + "empty/", b"")
        for name, content in (CONTENT | UNSEEN).items():
            archive.writestr(name if name.startswith("__") else outer + name, content)
    return path


@pytest.fixture(params=["folder", "nested folder", "zip", "nested zip"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> FileTree:
    if request.param == "folder":
        return FileTree.open(write_folder(tmp_path / "root"), "a")
    if request.param == "nested folder":
        write_folder(tmp_path / "root" / "outer" / "inner")
        return FileTree.open(tmp_path / "root", "a")
    outer = "outer/inner/" if request.param == "nested zip" else ""
    return FileTree.open(str(write_zip(tmp_path / "root.zip", outer)), "x", "a")


def test_lists_and_reads_files_and_folders(tree: FileTree) -> None:
    assert tree.names() == sorted(CONTENT)
    assert {name: tree.read(name) for name in tree.names()} == CONTENT
    assert tree.folders() == ["a", "b", "empty"]
    assert tree.folders("a") == ["deep"]
    assert tree.folders("empty") == tree.folders("missing") == []


def test_a_copy_sent_to_another_process_reads_too(tree: FileTree) -> None:
    tree.read("top.txt")
    assert pickle.loads(pickle.dumps(tree)).read("a/one.txt") == b"1"


def test_a_forked_process_leaves_the_position_in_the_zip_alone(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "root.zip", "w") as archive:
        for name in ("one", "two"):
            archive.writestr(name, bytes(100_000))  # more than a buffer holds
    tree = FileTree.open(tmp_path / "root.zip")
    tree.read("one")
    file = tree._zip().fp
    assert file is not None
    before = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    child = get_context("fork").Process(target=tree.read, args=("two",))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == before


def test_what_cannot_be_read_is_an_oserror(tree: FileTree) -> None:
    with pytest.raises(OSError):
        tree.read("a/missing.txt")


def test_damage_within_a_zip_is_an_oserror(tmp_path: Path) -> None:
    path = tmp_path / "root.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/one.txt", b"something")
    path.write_bytes(path.read_bytes().replace(b"something", b"some_hing"))
    with pytest.raises(OSError, match="damaged"):
        FileTree.open(path).read("a/one.txt")


def test_wrong_roots_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(UserError, match="neither a folder nor a zip"):
        FileTree.open(tmp_path / "text.zip")
    with pytest.raises(UserError, match="does not exist"):
        FileTree.open(tmp_path / "missing")


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere")
    (tmp_path / "root").mkdir()
    os.symlink(tmp_path / "elsewhere" / "a", tmp_path / "root" / "a")
    tree = FileTree.open(tmp_path / "root", "a")
    assert tree.names() == ["a/deep/er.txt", "a/one.txt"]
