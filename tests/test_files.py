"""Files of anybody's: pipes, devices, links and damaged ones get one sentence, and none hangs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import load_config
from deepmoe.errors import UserError
from deepmoe.files import LOCK_NAME, exclusive, write_atomically
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


@pytest.mark.parametrize("draft", ["pipe", "link"])
def test_what_stands_where_a_draft_goes_is_no_way_out(draft: str, tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_bytes(b"kept")
    left = tmp_path / "file.tmp"
    os.mkfifo(left) if draft == "pipe" else left.symlink_to(other)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and not path.is_symlink()
    assert other.read_bytes() == b"kept" and not left.exists()
