"""Checkpoints and lessons that others need: made once, and again where they are gone."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_sweeps import TINY, InThisProcess, lines_of, write, write_lines

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.config import apply_overrides
from deepmoe.errors import UserError
from deepmoe.sweep import Grid, Run, read_grid, steps, sweep
from deepmoe.sweep.steps import Teaching
from deepmoe.training.checkpoint_store import CheckpointStore
from deepmoe.training.log import METRICS_NAME


def test_a_checkpoint_that_goes_with_another_start_is_not_filed_under_this_one(
    swept, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("deepmoe.sweep.local.Worker", InThisProcess)
    grid = Grid(swept[0].runs[:2], 1)
    shutil.copytree(swept[1] / "runs", tmp_path / "runs")
    student = tmp_path / "runs" / "student-seed0"
    lines = lines_of(swept[1] / "runs.jsonl")
    results = tmp_path / "runs.jsonl"

    def again(*kept: str) -> tuple[dict, str]:
        write_lines(results, *(lines[name] for name in kept))
        before = (student / "log.txt").stat().st_mtime_ns
        assert sweep(grid, tmp_path / "runs", results, command="test")
        assert (student / "log.txt").stat().st_mtime_ns > before
        return lines_of(results)["student-seed0"]["values"], capsys.readouterr().err

    # Its line alone is gone: the finished checkpoint is as good as it was.
    same, told = again("dense-seed0")
    assert "from the beginning" not in told
    assert same == lines["student-seed0"]["values"]
    # Dense has come to something else since.
    lines["dense-seed0"]["values"]["seconds"] += 1.0
    figures = json.loads((student / METRICS_NAME).read_text().splitlines()[-1])
    assert figures["accuracy"] == same["last"]["accuracy"]
    write_lines(student / METRICS_NAME, {**figures, "accuracy": 0.123})  # not to be filed
    trained, told = again("dense-seed0")
    assert "student-seed0: its checkpoint goes with another result of dense-seed0" in told
    assert trained["needs"] != same["needs"]
    assert trained["last"]["accuracy"] == same["last"]["accuracy"]
    # Without its last checkpoint, nothing can be gone on from.
    (student / "last.safetensors").unlink()
    again_trained, told = again("dense-seed0")
    assert "student-seed0: last.safetensors is gone, so it is trained from the beginning" in told
    assert again_trained["last"]["accuracy"] == trained["last"]["accuracy"]


def test_a_run_goes_on_from_the_networks_it_was_begun_with(swept, tmp_path: Path) -> None:
    grid, folder = swept
    student = grid.runs[0]
    other = Run("other", apply_overrides(grid.runs[1].config, ["train.lr=0.05"]))
    changed = apply_overrides(student.config, ["train.teacher=run:other-seed0"])
    with pytest.raises(UserError, match="student-seed0 was started with another start or teacher"):
        sweep(
            Grid((*grid.runs[1:2], other, Run("student", changed)), 1),
            folder / "runs",
            tmp_path / "runs.jsonl",
            command="test",
        )


def test_a_run_whose_checkpoint_is_gone_is_trained_again_for_those_that_need_it(
    swept, tmp_path: Path, monkeypatch
) -> None:
    grid, folder = swept
    started = []

    class Failing(InThisProcess):
        returned = 1

        def begin(self, _: Sequence[str], log: Path) -> None:
            started.append(log.parent.name)

    monkeypatch.setattr("deepmoe.sweep.local.Worker", Failing)
    results = write_lines(tmp_path / "some.jsonl", lines_of(folder / "runs.jsonl")["dense-seed0"])
    grid = Grid(grid.runs[:2], 2)
    assert not sweep(grid, tmp_path / "elsewhere", results, command="test")
    assert started == ["dense-seed0"]  # it failed, so that the student was never started
    # Nor is one that was stopped on its way a network to take.
    last = CheckpointStore(tmp_path / "elsewhere" / "dense-seed0", keep=0).last
    trained = load_checkpoint(folder / "runs" / "dense-seed0" / last.name)
    parts = (trained.model, trained.config, trained.info)
    save_checkpoint(last, *parts, TrainState(epoch=0))
    assert not sweep(grid, tmp_path / "elsewhere", results, command="test")
    assert started == ["dense-seed0"] * 2
    save_checkpoint(last, *parts, trained.state)
    assert not sweep(grid, tmp_path / "elsewhere", results, command="test")
    assert started[2:] == ["student-seed0"]


def test_a_run_trained_again_for_its_checkpoint_leaves_its_result_alone(
    swept, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("deepmoe.sweep.local.Worker", InThisProcess)
    student, dense, *_ = swept[0].runs
    shutil.copytree(swept[1] / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "dense-seed0" / "last.safetensors").unlink()
    line = lines_of(swept[1] / "runs.jsonl")["dense-seed0"]
    results = write_lines(tmp_path / "runs.jsonl", line)
    grid = Grid((dense, Run("new", student.config)), 1)
    assert sweep(grid, tmp_path / "runs", results, command="test")
    assert lines_of(results)["dense-seed0"] == line
    assert "left as it was" in capsys.readouterr().err


def test_what_is_trained_again_for_its_checkpoint_keeps_its_place(
    swept, tmp_path: Path, monkeypatch
) -> None:
    """Else a sweep that is stopped has done all runs but those that need it."""
    grid, folder = swept
    started = []

    class Recorded(InThisProcess):
        returned = 1

        def begin(self, _: Sequence[str], log: Path) -> None:
            started.append(log.parent.name)

    monkeypatch.setattr("deepmoe.sweep.local.Worker", Recorded)
    student, dense, broken = grid.runs
    results = write_lines(tmp_path / "one.jsonl", lines_of(folder / "runs.jsonl")["dense-seed0"])
    assert not sweep(Grid((dense, student, broken), 1), tmp_path / "new", results, command="test")
    assert started == ["dense-seed0", "broken-seed0"]


def told(commands: list[list[str]]) -> list[str]:
    """What was started since the last look, by the name of its folder or file."""
    found = [Path(command[command.index("--out") + 1]).name for command in commands]
    commands.clear()
    return found


def test_lessons_are_written_once_and_students_wait_for_them(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    learning = '"train.teacher" = "lessons:dense"\n"loss.distillation" = 0.5\n'
    text = TINY.replace("[0, 1]", "[0]").replace("jobs = 2", "jobs = 2\nviews = 2") + (
        f'[runs.student]\n{learning}[runs.dense]\nseeds = [0, 1]\n"model.gates" = "none"\n'
        '[runs.small]\n"model.gates" = "none"\n"train.start" = "run:dense"\n"train.prune" = 0.9\n'
    )
    more = f'[runs.later]\n{learning}[runs.like_small]\n"train.teacher" = "run:small"\n' + (
        '"loss.distillation" = 0.5\n'
    )
    runs, results = tmp_path / "runs", tmp_path / "runs.jsonl"
    lessons = runs / "lessons-dense.safetensors"

    def swept(grid_text: str, out: Path = runs) -> list[str]:
        assert sweep(read_grid(write(tmp_path, grid_text)), out, results, command="test")
        return told(commands)

    started = swept(text)
    assert sorted(started[:2]) == ["dense-seed0", "dense-seed1"]
    assert sorted(started[2:]) == sorted(["small-seed0", lessons.name, "student-seed0"])
    assert started.index(lessons.name) < started.index("student-seed0")
    student = load_checkpoint(runs / "student-seed0" / "last.safetensors").config
    assert student.train.teacher == str(lessons)
    assert load_file(lessons)["outputs"].shape == (2, 1437, 10)  # views, images, classes
    values = lines_of(results)["student-seed0"]["values"]
    assert values["last"]["distillation_loss"] > 0
    assert "lessons:dense-seed0,dense-seed1" in values["config"]

    # They are there for others, and so is a pruned network that is trained already.
    assert swept(text + more) == ["later-seed0", "like_small-seed0"]

    # A student that was stopped goes on elsewhere, but not with lessons of other networks.
    moved = runs.rename(tmp_path / "moved")
    kept = [line for name, line in lines_of(results).items() if name != "later-seed0"]
    write_lines(results, *kept)
    assert swept(text + more, moved) == ["later-seed0"]
    write_lines(results, *kept)
    newer = (moved / lessons.name).stat().st_mtime + 10
    os.utime(moved / "dense-seed1" / "last.safetensors", (newer, newer))
    assert swept(text + more, moved) == [lessons.name, "later-seed0"]

    # Nor with what is no longer whole, which is written again.
    write_lines(results, *kept)
    (moved / lessons.name).write_bytes((moved / lessons.name).read_bytes()[:-100])
    os.utime(moved / lessons.name, (newer, newer))
    assert swept(text + more, moved) == [lessons.name, "later-seed0"]


def test_lessons_that_can_not_be_written_stop_no_other_run(
    tmp_path: Path, commands: list[list[str]], monkeypatch, capsys
) -> None:
    def learning(group: str) -> str:
        return f'"train.teacher" = "lessons:{group}"\n"loss.distillation" = 0.5\n'

    text = TINY.replace("[0, 1]", "[0]") + (
        f"[runs.bad_student]\n{learning('bad')}[runs.good_student]\n{learning('good')}"
        '[runs.bad]\n"model.gates" = "none"\n[runs.good]\n"model.gates" = "none"\n'
    )

    def teach_one(run: Run, out: Path, lessons: Path, views: int) -> Teaching:
        return Teaching(run, out, lessons, 0 if "bad" in run.name else 1)

    monkeypatch.setattr(steps, "Teaching", teach_one)
    grid, results = read_grid(write(tmp_path, text)), tmp_path / "runs.jsonl"
    assert not sweep(grid, tmp_path / "runs", results, command="test")
    assert sorted(lines_of(results)) == ["bad-seed0", "good-seed0", "good_student-seed0"]
    assert told(commands).count("lessons-bad.safetensors") == 1
    lines = capsys.readouterr().err.splitlines()
    (failed,) = [line for line in lines if "lessons-bad.safetensors: failed" in line]
    assert "lessons-bad.log: Error: views must be from 1 to 10,000, not 0" in failed
    assert lines[-1] == "bad_student-seed0: needs a run that failed"
