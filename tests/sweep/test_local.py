"""Runs in processes of this machine, and in this one."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked import Forked
from helpers import slow
from small_sweeps import TINY, write
from test_exclusive import HOLD

from deepmoe.checkpoint import load_checkpoint
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.files import exclusive
from deepmoe.sweep import read_grid, read_results, sweep
from deepmoe.sweep.local import LocalProcesses, ThisProcess, Worker
from deepmoe.sweep.schedule import Job


def test_two_sweeps_do_not_share_a_folder(swept, tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(UserError, match="in use by this process"):
        sweep(swept[0], tmp_path, tmp_path / "runs.jsonl", command="test")


def test_runs_that_a_killed_sweep_left_training_are_named(
    swept, tmp_path: Path, monkeypatch
) -> None:
    grid, _ = swept
    monkeypatch.setattr("deepmoe.sweep.local.Worker", lambda: pytest.fail("started"))
    command = [sys.executable, "-c", HOLD, str(tmp_path / "dense-seed0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            with pytest.raises(UserError) as told:
                sweep(grid, tmp_path, tmp_path / "runs.jsonl", command="test")
        finally:
            process.kill()
    message = str(told.value)
    assert message.startswith(f"dense-seed0 is still being trained by process {process.pid} on ")
    assert "left by a sweep that was killed" in message and "student" not in message


def test_a_killed_run_is_told_from_one_that_failed(tmp_path: Path, monkeypatch, capsys) -> None:
    grid = read_grid(write(tmp_path, TINY.replace("[0, 1]", "[0]")))

    class Killed(Worker):
        def begin(self, arguments: Sequence[str], log: Path) -> None:
            self._process.kill()
            self._process.wait()  # so that nobody reads what comes
            super().begin(arguments, log)

    monkeypatch.setattr("deepmoe.sweep.local.Worker", Killed)
    assert not sweep(grid, tmp_path / "runs", tmp_path / "runs.jsonl", command="test")
    assert "killed by SIGKILL" in capsys.readouterr().err


def test_a_run_that_ends_as_it_is_asked_to_stop_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended well, and its process waits for the next command."""
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\ntrap '' TERM\necho 0\nexec cat\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    worker = Worker()
    while worker.code() is None:  # until it can't be told to end
        time.sleep(0.01)
    worker.terminate()
    waiting = threading.Thread(target=worker.wait)
    waiting.start()
    waiting.join(timeout=20)
    hangs = waiting.is_alive()
    worker._process.kill()
    waiting.join()
    assert not hangs


@pytest.mark.parametrize("asked", [signal.SIGINT, slow(signal.SIGHUP)])
def test_an_interrupted_sweep_lets_its_runs_save(asked: signal.Signals, tmp_path: Path) -> None:
    text = TINY.replace("[0, 1]", "[0]").replace('"train.epochs" = 1', '"train.epochs" = 500')
    path = write(tmp_path, text)
    command = ["deepmoe", "sweep", str(path), "--out", str(tmp_path / "runs")]
    metrics = tmp_path / "runs" / "grid-seed0" / "metrics.jsonl"
    # In a session of its own, as a terminal has: a Ctrl-C reaches the whole of it.
    process = Forked(command, cwd=tmp_path)
    try:
        while not (metrics.exists() and metrics.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        if asked == signal.SIGINT:
            os.killpg(process.pid, asked)
        else:
            process.send_signal(asked)
        assert process.wait(timeout=60) == 128 + asked
    finally:
        process.terminate()
        process.wait()
    log = (metrics.parent / "log.txt").read_text()
    assert "is saved, and --resume goes on" in log
    assert load_checkpoint(metrics.parent / "last.safetensors").state.epoch >= 1


def test_short_runs_stay_in_this_process(tmp_path: Path, capsys) -> None:
    text = f"""
[runs.dense]
"model.gates" = "none"
"train.target_macs" = 1.0
[runs.student]
"train.teacher" = "lessons:dense"
"loss.distillation" = 0.5
[runs.lost]
"train.start" = "{tmp_path}/nothing.safetensors"
"""
    grid = read_grid(write(tmp_path, TINY.replace("[0, 1]", "[0]") + text))
    out, results = tmp_path / "runs", tmp_path / "runs.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        patch.setattr("deepmoe.sweep.steps.origin", lambda _: {"hardware": "here"})
        assert not sweep(grid, out, results, command="test", here=True)
    assert set(read_results(results)) == {"dense-seed0", "student-seed0"}
    assert (out / "lessons-dense.safetensors").exists()
    assert "Error: train.start: no checkpoint" in (out / "lost-seed0" / "log.txt").read_text()
    assert "lost-seed0: failed" in capsys.readouterr().err


def test_what_is_stopped_in_this_process_says_how_to_go_on(tmp_path: Path) -> None:
    """No sweep, comparison or paper has --resume."""

    def stopped() -> None:
        raise TrainingInterrupted("stopped by SIGTERM after batch 3", "runs/a/last.safetensors")

    job = Job("a", ("train",), tmp_path / "log.txt", "cpu", stopped)
    with pytest.raises(TrainingInterrupted, match="is saved, and the same command goes on"):
        ThisProcess().start(job)


def test_a_worker_runs_one_command_after_the_other_until_one_fails(tmp_path: Path) -> None:
    def ended(arguments: list[str], log: Path) -> int:
        worker.begin(arguments, log)
        while (code := worker.code()) is None:
            time.sleep(0.02)
        return code

    worker, logs = Worker(), [tmp_path / name for name in ("a b.txt", "second.txt", "third.txt")]
    try:
        assert ended(["--version"], logs[0]) == 0
        assert ended(["macs", "vgg11"], logs[1]) == 0
        assert ended(["eval", str(tmp_path / "nothing")], logs[2]) == 2
    finally:
        worker.wait()  # it has gone by itself
    texts = [log.read_text() for log in logs]
    assert texts[0].startswith("deepmoe, version") and "vgg11" in texts[1]
    assert "version" not in texts[1]
    assert texts[2].startswith("Error: no checkpoint at ")


def test_a_process_that_was_killed_while_it_had_nothing_to_do_is_replaced(tmp_path: Path) -> None:
    def job(name: str) -> Job:
        return Job(name, ("--version",), tmp_path / f"{name}.txt", "cpu", lambda: None)

    def ended() -> list[tuple[str, int]]:
        while not (found := backend.ended()):
            time.sleep(0.02)
        return [(job.name, end.code) for job, end in found]

    backend = LocalProcesses(1)
    try:
        backend.start(job("first"))
        assert ended() == [("first", 0)]
        (idle,) = backend._idle
        idle._process.kill()
        idle._process.wait()
        backend.start(job("second"))
        assert ended() == [("second", 0)]
        (tmp_path / "third.txt").mkdir()
        backend.start(job("third"))  # nowhere to write what it says
        assert backend.has_room() and ended() == [("third", 2)]
    finally:
        backend.stop()
