"""Folders and zip files look alike."""

import os
import pickle
import struct
import zipfile
from multiprocessing import get_context
from pathlib import Path

import pytest

from deepmoe.data.file_tree import FileTree
from deepmoe.data.reading import Unreadable
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


def test_what_cannot_be_read_is_unreadable(tree: FileTree) -> None:
    for name in ("a/missing.txt", "a", "b/../a/one.txt/x"):
        with pytest.raises(Unreadable):
            tree.read(name)
    assert (tree.has("top.txt"), tree.has("a/missing.txt")) == (True, False)


def test_no_more_than_the_limit_is_read(tree: FileTree) -> None:
    assert tree.read("a/deep/er.txt", limit=4) == b"deep"
    with pytest.raises(Unreadable, match="4 bytes are more than the 3 that are read"):
        tree.read("a/deep/er.txt", limit=3)


def zip_of(path: Path, *names: str, kind: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"something" * 1000, kind)
    return path


def change(path: Path, before: bytes, after: bytes) -> None:
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))


def lie_about_length(path: Path, length: int) -> None:
    change(path, struct.pack("<I", 9000), struct.pack("<I", length))


DAMAGE = {
    "other bytes": (lambda path: change(path, b"something", b"some_hing"), "CRC"),
    "shorter than it says": (lambda path: lie_about_length(path, 9001), "damaged"),
    "longer than it says": (lambda path: lie_about_length(path, 10), "CRC"),
    "huge by what it says": (lambda path: lie_about_length(path, 2**32 - 2), "more than the"),
    "encrypted": (
        lambda path: change(path, b"PK\x01\x02\x14\x03\x14\0\0", b"PK\x01\x02\x14\x03\x14\0\1"),
        "encrypted",
    ),
    "cut": (lambda path: change(path, b"PK\x03\x04", b"PK\x03\x05"), "damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_within_a_zip_is_unreadable(kind: str, tmp_path: Path) -> None:
    stored = kind == "other bytes"
    path = zip_of(
        tmp_path / "root.zip", "a/one", kind=zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    )
    damage, message = DAMAGE[kind]
    damage(path)
    with pytest.raises(Unreadable, match=message) as caught:
        FileTree.open(path).read("a/one")
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 9, 93])  # deflate64, zstd
def test_only_what_can_be_unpacked_up_to_a_limit_is(kind: int, tmp_path: Path) -> None:
    known = kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    path = zip_of(tmp_path / "root.zip", "a/one", kind=kind if known else zipfile.ZIP_DEFLATED)
    if not known:
        change(path, b"\x14\x03\x14\0\0\0\x08\0", b"\x14\x03\x14\0\0\0" + bytes([kind]) + b"\0")
    with pytest.raises(Unreadable, match="packed in an unusual way"):
        FileTree.open(path).read("a/one")


@pytest.mark.parametrize(
    "name",
    ["/etc/a.jpg", "../a.jpg", "train/a/../b/x.jpg", "./train/x.jpg", "a//b", "train\\x.jpg"],
)
def test_zips_with_names_that_lead_astray_are_refused(name: str, tmp_path: Path) -> None:
    path = zip_of(tmp_path / "root.zip", "train/fine.jpg", name)
    with pytest.raises(UserError, match=r"root\.zip: it holds the name .* packed anew"):
        FileTree.open(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zips_with_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"root\.zip: it holds two files of the name 'a/one'"):
        FileTree.open(zip_of(tmp_path / "root.zip", "a/one", "a/one"))


def test_a_folder_in_a_zip_may_be_named_like_a_file(tmp_path: Path) -> None:
    tree = FileTree.open(zip_of(tmp_path / "root.zip", "a/b.jpg/", "a/b.jpg/c.jpg"))
    assert (tree.names(), tree.folders("a")) == (["a/b.jpg/c.jpg"], ["b.jpg"])


def test_a_zip_of_very_deep_folders(tmp_path: Path) -> None:
    deep = "x/" * 20_000 + "one"
    tree = FileTree.open(zip_of(tmp_path / "root.zip", deep), "train")
    assert [len(name) for name in tree.names()] == [len(deep) - 16]  # eight outer folders less


def test_names_that_are_not_utf_8_are_one_sentence(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "root.zip", "a/\u00e9")  # marked as UTF-8
    change(path, "\u00e9".encode(), b"\xff\xff")
    with pytest.raises(UserError, match=r"root\.zip: the zip file is damaged"):
        FileTree.open(path)


def test_wrong_roots_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(UserError, match="neither a folder nor a zip"):
        FileTree.open(tmp_path / "text.zip")
    with pytest.raises(UserError, match="does not exist"):
        FileTree.open(tmp_path / "missing")
    with pytest.raises(UserError, match="does not exist"):
        FileTree.open("~nobody-of-this-name/x\0")
    os.mkfifo(tmp_path / "pipe.zip")  # nobody ever writes into it
    with pytest.raises(UserError, match="neither a folder nor a zip"):
        FileTree.open(tmp_path / "pipe.zip")


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere")
    (tmp_path / "root").mkdir()
    os.symlink(tmp_path / "elsewhere" / "a", tmp_path / "root" / "a")
    tree = FileTree.open(tmp_path / "root", "a")
    assert tree.names() == ["a/deep/er.txt", "a/one.txt"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe")  # nobody ever writes into it
    (tmp_path / "a" / "endless").symlink_to("/dev/zero")
    (tmp_path / "a" / "nowhere").symlink_to("missing")
    (tmp_path / "a" / "round").symlink_to("round")
    tree = FileTree.open(tmp_path)
    assert tree.names() == ["a/endless", "a/nowhere", "a/pipe", "a/round"]  # none goes unnoticed
    for name in tree.names():
        with pytest.raises(Unreadable, match=r"not a regular file|No such file|symbolic links"):
            tree.read(name)


@pytest.mark.parametrize("target", [".", "..", "../..", "../../..", "/"])
def test_links_that_lead_round_in_circles_are_passed_over(target: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "outer" / "root")
    (root / "a" / "up").symlink_to(target)
    (root / "up").symlink_to(root)
    tree = FileTree.open(root, "a")
    assert tree.names() == sorted(CONTENT)
    assert tree.names("a") == ["a/deep/er.txt", "a/one.txt"]
    assert (tree.folders(), tree.folders("a")) == (["a", "b", "empty"], ["deep"])


def test_circles_over_other_places_are_passed_over(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "root")
    (tmp_path / "elsewhere").mkdir()
    (root / "a" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(root)
    assert FileTree.open(root).names("a") == ["a/deep/er.txt", "a/one.txt"]


@pytest.mark.parametrize(
    ("link", "target", "both"),
    [
        ("split/a/more", "../b", "split/b and split/a/more"),
        ("split/c", "a/deep", "split/c and split/a/deep"),
        ("split/c", "b", "split/b and split/c"),
    ],
)
def test_a_folder_that_is_reached_twice_is_refused(
    link: str, target: str, both: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "split")
    (tmp_path / link).symlink_to(target)
    with pytest.raises(UserError, match=f"{both} in .* are the same folder"):
        FileTree.open(tmp_path).names("split")


def test_two_splits_may_be_one_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "train")
    (tmp_path / "val").symlink_to("train")
    tree = FileTree.open(tmp_path, "train")
    assert tree.names("val") == [n.replace("train/", "val/") for n in tree.names("train")]
