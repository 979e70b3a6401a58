"""Worker processes and signals."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def run(root: Path, action: str) -> subprocess.CompletedProcess:
    """In a group of its own; returns once the last process of it has closed its output."""
    for split in ("train", "val"):
        for number in range(20):
            path = root / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(path)
    command = [sys.executable, Path(__file__).with_name("signalled_workers.py"), root, action]
    threads = {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | threads,
        start_new_session=True,
        timeout=120,  # for a run that hangs
    )


@pytest.mark.parametrize(
    ("action", "noted"), [("group", ["SIGHUP", "SIGINT", "SIGTERM"]), ("start", [])]
)
def test_workers_leave_signals_to_the_main_process(
    action: str, noted: list, tmp_path: Path
) -> None:
    done = run(tmp_path, action)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"60 {noted}\n"


def test_a_killed_worker_is_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, "worker")
    assert done.returncode == 1
    assert re.fullmatch(
        r"one sentence: a process that decodes images was killed \(.*\): "
        r"where memory or /dev/shm is short, set data.workers lower\n",
        done.stderr,
    )


def test_workers_end_with_the_main_process(tmp_path: Path) -> None:
    assert run(tmp_path, "main").returncode == -signal.SIGKILL
