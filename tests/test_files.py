"""Files of anybody's: pipes, devices, links and damaged ones get one sentence, and none hangs."""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import load_config
from deepmoe.drafts import drafted
from deepmoe.errors import UserError
from deepmoe.files import (
    LOCK_NAME,
    check_replaceable,
    check_writable,
    exclusive,
    write_atomically,
    write_together,
)
from deepmoe.sparse import Plan
from deepmoe.sweep import read_grid, read_results

READERS: dict[str, Callable[[Path], object]] = {
    "preset": load_config,
    "grid": read_grid,
    "plan": Plan.load,
    "results": read_results,
    "checkpoint": load_checkpoint,
}


@pytest.fixture(params=["pipe", "endless", "loop", "folder", "huge", "too long a name"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What is no file, or none to read whole, under a name that looks like one."""
    path = tmp_path / "odd.toml"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "endless":
        path.symlink_to("/dev/zero")
    elif request.param == "loop":
        path.symlink_to(path)
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "huge":
        with path.open("wb") as file:
            file.truncate(2**40)  # of which nothing is on the disk
    else:
        path = tmp_path / ("x" * 5000 + ".toml")
    return path


@pytest.mark.parametrize("reader", READERS)
def test_what_can_not_be_read_whole_is_refused(reader: str, odd: Path) -> None:
    with pytest.raises(UserError) as told:
        READERS[reader](odd)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("path", [None, 3, b"x", ["a"]])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(UserError, match="a checkpoint is given by its path, not by a"):
        load_checkpoint(path)  # type: ignore[arg-type]


def test_what_stands_where_a_lock_goes_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_NAME)
    with pytest.raises(UserError, match=r"cannot write .*\.lock: "), exclusive(tmp_path):
        pass


@pytest.mark.parametrize("draft", ["pipe", "link", "hard link", "folder"])
def test_what_stands_where_a_draft_goes_is_no_way_out(draft: str, tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_bytes(b"kept")
    left = tmp_path / "file.0.tmp"
    if draft == "pipe":
        os.mkfifo(left)
    elif draft == "folder":
        left.mkdir()
    else:
        left.symlink_to(other) if draft == "link" else left.hardlink_to(other)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and not path.is_symlink()
    assert other.read_bytes() == b"kept"
    assert {p.name for p in tmp_path.iterdir()} == {"other", "file", left.name}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture(params=["locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Also a file system without any."""
    if request.param == "locks":
        return True

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    return False


def test_writers_of_one_file_have_drafts_of_their_own(tmp_path: Path, locks: bool) -> None:
    """With one for all, a writer would rename what another has half written."""
    path = tmp_path / "result.json"
    with drafted(path, b"first") as first:
        write_atomically(path, b"second")
        assert path.read_bytes() == b"second"
        with drafted(path, b"third") as third:
            assert first.read_bytes() == b"first" and third.read_bytes() == b"third"
            third.replace(path)
        first.replace(path)
    assert path.read_bytes() == b"first" and names(tmp_path) == [path.name]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_a_writer_that_is_stopped_takes_its_draft_along(
    tmp_path: Path, locks: bool, stop: type[BaseException]
) -> None:
    with pytest.raises(stop), drafted(tmp_path / "a", b"never"):
        raise stop
    assert names(tmp_path) == []


def test_a_writer_that_is_stopped_late_leaves_the_drafts_of_others(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with contextlib.ExitStack() as others:
        with pytest.raises(KeyboardInterrupt), drafted(path, b"first") as draft:
            draft.replace(path)
            second = others.enter_context(drafted(path, b"second"))
            assert second == draft
            raise KeyboardInterrupt
        assert second.read_bytes() == b"second"
        second.replace(path)
    assert path.read_bytes() == b"second" and names(tmp_path) == ["a"]


def test_what_killed_writers_left_does_not_pile_up(tmp_path: Path) -> None:
    """A run that is killed again and again must not fill the disk, nor leave wrong bytes behind."""
    path = tmp_path / "a"
    code = (
        "import os, sys; from pathlib import Path; from deepmoe.drafts import drafted\n"
        "with drafted(Path(sys.argv[1]), b'x' * 1000): os.kill(os.getpid(), 9)"
    )
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
        assert killed.returncode == -9 and names(tmp_path) == ["a.0.tmp"]
    write_atomically(path, b"short")
    assert path.read_bytes() == b"short" and names(tmp_path) == ["a"]


def test_files_written_together_have_drafts_of_their_own(tmp_path: Path) -> None:
    with drafted(tmp_path / "a", b"of another") as draft:
        write_together(tmp_path, {"a": b"1", "b": b"2"})
        assert draft.read_bytes() == b"of another"
    assert names(tmp_path) == ["a", "b"]
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError, match="c is a folder"):
        write_together(tmp_path, {"a": b"3", "c": b"4"})
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_name_as_long_as_names_can_be_is_written(tmp_path: Path, locks: bool) -> None:
    path = tmp_path / ("é" * 127)  # 254 bytes
    write_atomically(path, b"1")
    write_atomically(path, b"2")
    assert path.read_bytes() == b"2" and names(tmp_path) == [path.name]


def test_the_root_is_no_file() -> None:
    with pytest.raises(UserError, match="cannot write /: Is a directory"):
        check_replaceable(Path("/"), b"x")


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_what_is_no_folder_on_the_way_to_a_file_is_named(kind: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch() if kind == "file" else there.symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="there is not a folder"):
        check_writable(there / "inner" / "file")
