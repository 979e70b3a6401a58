"""Commands as processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import tiny_config
from test_exclusive import HOLD

from deepmoe import launch
from deepmoe.config import config_to_toml
from deepmoe.files import user_of

WORKER = """
import sys
from deepmoe.launch import run_here
folder = sys.argv[1]
arguments = ["train", f"{folder}/sweep.toml", "--resume", "--out", folder]
run_here(arguments, f"{folder}/log.txt", own=folder, threads="1", folder=folder, device="cpu")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds a process to its parent")
def test_a_command_dies_with_the_worker_that_runs_it(tmp_path: Path) -> None:
    config = tiny_config("train.epochs=5000", "train.device=cpu")
    (tmp_path / "sweep.toml").write_text(config_to_toml(config))
    with subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)]) as worker:
        try:
            while (user := user_of(tmp_path)) is None:
                assert worker.poll() is None
                time.sleep(0.05)
        finally:
            worker.kill()
    deadline = time.monotonic() + 30
    while user_of(tmp_path) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert user.startswith("process ") and user_of(tmp_path) is None
    assert "saved" not in (tmp_path / "log.txt").read_text()  # killed, not asked to stop


def test_a_worker_in_a_script_s_background_hears_that_its_run_is_to_stop(tmp_path: Path) -> None:
    """There a shell lets processes ignore SIGINT, by which Ray cancels what they do."""
    config = tiny_config("train.epochs=5000", "train.device=cpu")
    (tmp_path / "sweep.toml").write_text(config_to_toml(config))
    deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN){WORKER}"
    with subprocess.Popen(
        [sys.executable, "-c", deaf, str(tmp_path)], stderr=subprocess.DEVNULL
    ) as worker:
        try:
            while not (tmp_path / "last.safetensors").exists():
                assert worker.poll() is None
                time.sleep(0.05)
            worker.send_signal(signal.SIGINT)
            assert worker.wait(timeout=60)
        finally:
            worker.kill()
    assert "is saved" in (tmp_path / "log.txt").read_text() and user_of(tmp_path) is None


def test_a_command_waits_for_the_lock_of_one_that_is_lost(tmp_path: Path, monkeypatch) -> None:
    own = tmp_path / "run"
    at_start = []

    def start(*_, **__) -> subprocess.Popen[bytes]:
        at_start.append(user_of(own))
        return subprocess.Popen(["false"])

    monkeypatch.setattr(launch, "launch", start)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(own)], stdout=subprocess.PIPE) as lost:
        assert lost.stdout is not None and lost.stdout.readline() == b"held\n"
        # It dies at the first look, as on a machine that is on its way down.
        monkeypatch.setattr(launch.time, "sleep", lambda _: (lost.kill(), lost.wait()))
        told = launch.run_here(
            ["train"], str(own / "log.txt"), own=str(own), threads="1", folder="", device="cpu"
        )
    assert told == (1, None) and at_start == [None] and lost.returncode == -signal.SIGKILL


def test_what_a_worker_tells_of_its_machine(tmp_path: Path) -> None:
    folder = str(tmp_path)
    log = tmp_path / "log.txt"
    code, origin = launch.run_here(
        ["--version"], str(log), own=None, threads="1", folder=folder, device="cpu"
    )
    assert code == 0 and f"{os.cpu_count()} cores" in origin["hardware"]
    assert log.read_text().startswith("on ") and "version" in log.read_text()
    assert launch.sees(str(tmp_path / "nothing"), "a") is None
    (tmp_path / "marker").write_text("a")
    assert launch.sees(str(tmp_path / "marker"), "b") is None
    assert launch.sees(str(tmp_path / "marker"), "a") == origin["versions"]["deepmoe"]
