"""Many runs from one grid file."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from forked import Forked
from helpers import slow
from safetensors.torch import load_file
from test_exclusive import HOLD

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import apply_overrides
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.files import exclusive
from deepmoe.sweep import Grid, Run, grid_name, read_grid, read_results, steps, summary, sweep
from deepmoe.sweep.grid import with_checkpoints
from deepmoe.sweep.local import LocalProcesses, ThisProcess, Worker
from deepmoe.sweep.schedule import Job
from deepmoe.sweep.steps import Teaching
from deepmoe.training.checkpoint_store import CheckpointStore
from deepmoe.training.log import METRICS_NAME

TINY = """
preset = "quickstart"
jobs = 2
seeds = [0, 1]

[settings]
"data.size" = 8
"model.widths" = [4, 4, 4, 4, 4, 4, 4, 4, 4]
"embedding.widths" = [4, 8]
"train.batch_size" = 256
"train.epochs" = 1
"train.finetune_epochs" = 0
"train.device" = "cpu"
"train.target_macs" = 0.9
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


def lines_of(results: Path) -> dict[str, dict]:
    """The lines of a file of results, by run."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["values"]["run"]: line for line in lines}


def write_lines(results: Path, *lines: dict) -> Path:
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return results


def test_every_run_combination_and_seed(tmp_path: Path) -> None:
    grid = read_grid(
        write(
            tmp_path,
            TINY
            + """
[runs.dense]
"model.gates" = "none"
[runs.latent]
"embedding.form" = "latent"
[grid]
"train.lr" = [0.1, 0.2]
"loss.sparsity" = [[[0, 0.0], [1, 0.1]]]
""",
        )
    )
    assert len(grid.runs) == 2 * 2 * 2
    run = next(r for r in grid.runs if r.name.startswith("latent-lr=0.2") and "seed1" in r.name)
    assert run.config.embedding.form == "latent" and run.config.model.gates == "inner"
    assert run.config.train.lr == 0.2 and run.config.train.seed == 1
    assert run.config.loss.sparsity == ((0, 0.0), (1, 0.1))
    assert len({r.name for r in grid.runs}) == len(grid.runs)


def test_the_example_of_the_documents_is_a_grid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "recipe.md").read_text(encoding="utf-8")
    grid = read_grid(write(tmp_path, text.split("```toml")[1].split("```")[0]))
    student = next(run for run in grid.runs if run.name == "student-lr=0.1-seed2")
    assert student.needs == ["dense-lr=0.1-seed2"]


def test_a_run_of_one_seed_serves_runs_of_all_seeds(tmp_path: Path) -> None:
    grid = read_grid(
        write(
            tmp_path,
            """
preset = "quickstart"
seeds = [0, 1]
[runs.teacher]
seeds = [7]
[runs.dense]
[runs.student]
"train.start" = "run:dense"
"train.teacher" = "run:teacher"
"loss.distillation" = 0.5
""",
        )
    )
    names = [run.name for run in grid.runs]
    assert names == [
        "teacher-seed7",
        "dense-seed0",
        "dense-seed1",
        "student-seed0",
        "student-seed1",
    ]
    assert grid.runs[-1].needs == ["dense-seed1", "teacher-seed7"]


def test_a_run_can_be_named_with_its_seed(tmp_path: Path) -> None:
    text = """
preset = "quickstart"
seeds = [0, 1]
[runs.dense]
[runs.student]
"train.start" = "run:dense"
"train.teacher" = ["run:dense-seed1", "runs:dense"]
"loss.distillation" = 0.5
"""
    student = read_grid(write(tmp_path, text)).runs[2]
    assert student.needs == ["dense-seed0", "dense-seed1", "dense-seed0", "dense-seed1"]
    labelled = read_grid(write(tmp_path, text + "[grid]\n'train.lr' = [0.1]\n")).runs[2]
    assert labelled.needs[:2] == ["dense-lr=0.1-seed0", "dense-lr=0.1-seed1"]
    with pytest.raises(UserError, match="seed0 needs dense-seed0, dense-seed2"):
        read_grid(write(tmp_path, text.replace("run:dense-seed1", "run:dense-seed2")))


def test_runs_of_all_seeds_teach_together(tmp_path: Path) -> None:
    text = """
preset = "quickstart"
seeds = [0, 1]
[runs.dense]
seeds = [3, 4]
[runs.student]
"train.teacher" = "runs:dense"
"loss.distillation" = 0.5
[grid]
"train.lr" = [0.1]
"""
    student = read_grid(write(tmp_path, text)).runs[-1]
    assert student.needs == ["dense-lr=0.1-seed3", "dense-lr=0.1-seed4"]
    assert student.config.train.teacher == tuple(f"run:{name}" for name in student.needs)
    resolved = with_checkpoints(student.config, lambda name: f"{name}.safetensors")
    assert resolved.train.teachers[1] == "dense-lr=0.1-seed4.safetensors"
    together = text.replace('"runs:dense"', '["runs:dense", "other.safetensors"]')
    teachers = read_grid(write(tmp_path, together)).runs[-1].config.train.teachers
    assert teachers == (*student.config.train.teacher, "other.safetensors")
    with pytest.raises(UserError, match="seed0 needs nobody-lr"):
        read_grid(write(tmp_path, text.replace("runs:dense", "runs:nobody")))


TAUGHT = """
preset = "quickstart"
seeds = [0, 1]
views = 7
[runs.dense]
seeds = [3, 4]
[runs.other]
[runs.student]
"train.teacher" = "lessons:dense"
"loss.distillation" = 0.5
[runs.after]
"train.start" = "run:student"
[runs.alone]
"""


def test_lessons_are_of_a_run_of_all_its_seeds(tmp_path: Path) -> None:
    grid = read_grid(write(tmp_path, TAUGHT))
    assert grid.views == 7
    assert read_grid(write(tmp_path, TAUGHT.replace("views = 7", ""))).views == 30
    student = next(run for run in grid.runs if run.name == "student-seed1")
    assert student.lessons == student.needs == ["dense-seed3", "dense-seed4"]
    assert student.config.train.teacher == "lessons:dense-seed3,dense-seed4"
    # With a start and in a grid: of the same combination.
    started = TAUGHT.replace("[runs.student]", "[runs.student]\n'train.start' = 'run:other'")
    both = read_grid(write(tmp_path, started + "[grid]\n'train.lr' = [0.1]\n"))
    student = next(run for run in both.runs if run.name == "student-lr=0.1-seed1")
    taught = ["dense-lr=0.1-seed3", "dense-lr=0.1-seed4"]
    assert student.needs == ["other-lr=0.1-seed1", *taught] and student.lessons == taught
    with pytest.raises(UserError, match="student-seed0 needs nobody-seed0"):
        read_grid(write(tmp_path, TAUGHT.replace("lessons:dense", "lessons:nobody")))


def test_some_of_the_runs_come_with_what_they_need(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path, TAUGHT)
    grid = read_grid(path)
    teachers = ["dense-seed3", "dense-seed4"]

    def names(*patterns: str) -> list[str]:
        return [run.name for run in grid.only(patterns).runs]

    assert names("alone") == ["alone-seed0", "alone-seed1"]
    assert names("after-seed1") == [*teachers, "student-seed1", "after-seed1"]
    assert names("a*-seed0") == [*teachers, "student-seed0", "after-seed0", "alone-seed0"]
    assert names("other", "dense-seed4") == ["dense-seed4", "other-seed0", "other-seed1"]
    assert names("*") == [run.name for run in grid.runs]
    assert (grid.only(["alone"]).jobs, grid.only(["alone"]).views) == (1, 7)
    for wrong in ("nobody", "student-seed7", ""):
        with pytest.raises(UserError, match=f"no run is named '{wrong}'"):
            grid.only(["alone", wrong])

    swept = []

    def note(grid: Grid, *_, **__) -> bool:
        swept.append([run.name for run in grid.runs])
        return True

    monkeypatch.setattr("deepmoe.sweep.sweep", note)
    done = CliRunner().invoke(main, ["sweep", str(path), "--only", "alone-seed1,dense-seed3"])
    assert done.exit_code == 0 and swept == [["dense-seed3", "alone-seed1"]]
    done = CliRunner().invoke(main, ["sweep", str(path), "--only", "alone,nobody"])
    assert done.exit_code == 2 and "no run is named 'nobody'" in done.output and len(swept) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset = 'quickstart'\nseed = 3", "seed"),
        ("preset = 'quickstart'\nseeds = []", "seed"),
        ("preset = 'nothing'", "nothing"),
        ("preset = 'quickstart'\n[settings]\n'train.speed' = 1", "speed"),
        (
            "preset = 'quickstart'\n[runs.a]\n'train.start' = 'run:b'\n",
            "a-seed0 needs b-seed0",
        ),
        (
            "preset = 'quickstart'\n[runs.a]\n[runs.b]\n'train.start' = 'runs:a'\n",
            "for teachers",
        ),
        (
            "preset = 'quickstart'\n[runs.a]\n[runs.b]\n'train.start' = 'lessons:a'\n",
            "lessons: is for teachers",
        ),
        ("preset = 'quickstart'\nviews = 0", "one view"),
        ("preset = ", "TOML"),
        ("preset = 'quickstart'\nseeds = [0, 0]", "two runs"),
        ("preset = 'quickstart'\n[grid]\n'train.lr' = []", "one value"),
        ("preset = 'quickstart'\n[runs.a]\nseeds = []", "one seed"),
        ("preset = 'quickstart'\n[runs.a-seed1]", "end in its seed"),
        ("preset = 'quickstart'\n[runs.'']", "letters, digits"),
        ("seeds = [1]", "preset: it is missing"),
        ("preset = 'quickstart'\n[grid]\n'heads.init' = 'ones'", "heads.init.*expected a list"),
        ("preset = 'quickstart'\n[settings]\n'train.lr' = 2024-01-01", "numbers, texts or lists"),
        ("preset = 'quickstart'\n[runs.a]\nseeds = 3", "list of whole numbers"),
        ("preset = 'quickstart'\n[grid]\n'train.seed' = [1, 2]", "at the top"),
        ("preset = 'quickstart'\n[settings]\ntrain.lr = 0.1", "quotes"),
        ("preset = 'quickstart'\n[runs.'../a']\n'train.lr' = 0.1", "letters"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_grid(write(tmp_path, text))


class InThisProcess:
    """Stands for a worker, without the seconds that one takes to start."""

    alive = True

    def begin(self, arguments: Sequence[str], log: Path) -> None:
        result = CliRunner().invoke(main, list(arguments))
        with log.open("a") as output:
            output.write(result.output)
        self.returned = result.exit_code

    def code(self) -> int:
        return self.returned

    def terminate(self) -> None:
        """It has ended."""

    def wait(self) -> None:
        """It has ended."""


def returning(code: int) -> Callable[[], InThisProcess]:
    """Workers that do nothing, and say this of it."""

    class Returning(InThisProcess):
        def begin(self, *_) -> None:
            self.returned = code

    return Returning


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Grid, Path]:
    folder = tmp_path_factory.mktemp("sweep")
    text = TINY.replace("[0, 1]", "[0]") + (
        '[runs.student]\n"train.start" = "run:dense"\n"train.teacher" = "run:dense"\n'
        '"loss.distillation" = 0.5\n[runs.dense]\n"model.gates" = "none"\n'
        '[runs.broken]\n"train.lr" = 900.0\n"train.loss_limit" = 1e-6\n'
    )
    grid = read_grid(write(folder, text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepmoe.sweep.local.Worker", InThisProcess)
        assert not sweep(grid, folder / "runs", folder / "runs.jsonl", command="test")
    return grid, folder


def test_runs_take_checkpoints_of_others_and_one_failure_stops_no_other(swept) -> None:
    folder = swept[1]
    lines = lines_of(folder / "runs.jsonl")
    assert list(lines) == ["dense-seed0", "student-seed0"]  # in the order in which they ended
    values = lines["student-seed0"]["values"]
    assert values["last"]["epoch"] == 1 and values["last"]["distillation_loss"] > 0
    assert lines["dense-seed0"]["values"]["last"]["distillation_loss"] == 0
    config = (folder / "runs" / "student-seed0" / "config.toml").read_text()
    assert str(folder / "runs" / "dense-seed0") in config
    assert "run:dense" in values["config"]


def test_what_has_a_result_is_left_alone_and_rows_hold_means(swept, monkeypatch) -> None:
    grid, folder = swept
    finished = Grid(grid.runs[:2], grid.jobs)
    monkeypatch.setattr("deepmoe.sweep.local.Worker", lambda: pytest.fail("started again"))
    assert sweep(finished, folder / "runs", folder / "runs.jsonl", command="test")
    rows = summary([run.name for run in grid.runs], read_results(folder / "runs.jsonl"))
    assert [row["run"] for row in rows] == ["student", "dense", "broken"]
    assert [row["seeds"] for row in rows] == [1, 1, 0]
    assert 0 <= rows[0]["accuracy"] <= 1 and rows[0]["macs_share"] < 1
    line = lines_of(folder / "runs.jsonl")["student-seed0"]
    assert rows[0]["seconds"] == line["values"]["seconds"]


def test_rows_of_seeds_hold_their_mean_and_deviation(swept) -> None:
    (dense, _) = read_results(swept[1] / "runs.jsonl").values()
    accuracies = {"dense-seed0": 0.4, "thin-seed0": 0.1, "dense-seed1": 0.6}
    done = {
        name: replace(dense, figures={"accuracy": accuracy, "epoch": 3})
        for name, accuracy in accuracies.items()
    }
    first, second = summary([*done, "thin-seed1"], done)
    assert first["run"] == "dense" and first["seeds"] == 2 and "epoch" not in first
    assert first["accuracy"] == pytest.approx(0.5)
    assert first["accuracy_deviation"] == pytest.approx(0.2 / 2**0.5)
    assert second == {"run": "thin", "seeds": 1, "accuracy": 0.1}


@pytest.mark.parametrize(
    "content", ["", "[]", '{"values": {"run"', '{"values": {"config": "a ="}}', "[" * 100_000]
)
def test_lines_that_are_no_results_are_named(swept, tmp_path: Path, content: str) -> None:
    grid, folder = swept
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{(folder / 'runs.jsonl').read_text()}{content}\n")
    with pytest.raises(UserError, match=f"line 3 of {path} is not the result"):
        sweep(grid, tmp_path / "runs", path, command="test")
    with pytest.raises(UserError, match=r"cannot read results in .* directory"):
        sweep(grid, tmp_path / "runs", tmp_path, command="test")


@pytest.mark.parametrize("damage", [{"seed": "x"}, {"seed": -1}, {"hardware": None}])
def test_origins_that_can_not_be_are_named(swept, tmp_path: Path, damage: dict) -> None:
    path = tmp_path / "runs.jsonl"
    first = json.loads((swept[1] / "runs.jsonl").read_text().splitlines()[0])
    path.write_text(json.dumps({**first, **damage}))
    with pytest.raises(UserError, match=f"{next(iter(damage))} can't be"):
        read_results(path)


@pytest.mark.parametrize("damage", [{"seconds": 10**400}, {"last": {"iou": {"\ud800": 0.5}}}])
def test_figures_that_can_not_be_are_refused(swept, tmp_path: Path, damage: dict) -> None:
    path = tmp_path / "runs.jsonl"
    first = json.loads((swept[1] / "runs.jsonl").read_text().splitlines()[0])
    path.write_text(json.dumps({**first, "values": {**first["values"], **damage}}))
    with pytest.raises(UserError, match=r"line 1 of .* is not the result of a sweep's run"):
        read_results(path)


def test_two_results_of_one_run_are_refused(swept, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(2 * (swept[1] / "runs.jsonl").read_text())
    with pytest.raises(UserError, match="two results of dense-seed0"):
        sweep(swept[0], tmp_path / "runs", path, command="test")


def test_a_result_goes_with_those_of_the_runs_it_needed(swept, tmp_path: Path) -> None:
    grid, folder = swept
    lines = lines_of(folder / "runs.jsonl")
    student, dense = lines["student-seed0"], lines["dense-seed0"]
    path = write_lines(tmp_path / "runs.jsonl", student)
    told = (
        r"student-seed0 in .*runs\.jsonl go with another result of dense-seed0: remove their lines"
    )
    with pytest.raises(UserError, match=told):
        sweep(grid, folder / "runs", path, command="test")
    dense["values"]["last"]["accuracy"] += 0.1
    write_lines(path, student, dense)
    with pytest.raises(UserError, match=told):
        sweep(grid, folder / "runs", path, command="test")


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


def test_two_sweeps_do_not_share_a_folder(swept, tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(UserError, match="in use by this process"):
        sweep(swept[0], tmp_path, tmp_path / "runs.jsonl", command="test")


def test_results_of_other_settings_are_refused(swept, tmp_path: Path) -> None:
    grid, folder = swept
    changed = apply_overrides(grid.runs[1].config, ["train.lr=0.01"])
    with pytest.raises(UserError, match="other settings"):
        sweep(Grid((Run("dense", changed),), 1), folder / "runs", folder / "runs.jsonl", command="")
    # As well where the setting that it had is gone since.
    dense = lines_of(folder / "runs.jsonl")["dense-seed0"]
    dense["values"]["config"] = dense["values"]["config"].replace("[data]", "[data]\nmixup = 0.5")
    path = write_lines(tmp_path / "runs.jsonl", dense)
    with pytest.raises(UserError, match="other settings"):
        sweep(grid, folder / "runs", path, command="test")


def test_results_of_runs_that_the_grid_does_not_have_are_left_alone(
    swept, tmp_path: Path, monkeypatch
) -> None:
    grid, folder = swept
    monkeypatch.setattr("deepmoe.sweep.local.Worker", returning(0))
    dense = lines_of(folder / "runs.jsonl")["dense-seed0"]
    dense["values"]["run"] = "mixed-seed0"
    dense["values"]["config"] = dense["values"]["config"].replace("[data]", "[data]\nmixup = 0.5")
    path = write_lines(tmp_path / "runs.jsonl", dense)
    before = path.read_text()
    assert sweep(Grid(grid.runs[1:2], 1), folder / "runs", path, command="test")
    assert path.read_text().startswith(before) and len(lines_of(path)) == 2


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """What a sweep starts, in this process: verbs and their arguments."""
    started = []

    class Noted(InThisProcess):
        def begin(self, arguments: Sequence[str], log: Path) -> None:
            started.append(list(arguments))
            super().begin(arguments, log)

    monkeypatch.setattr("deepmoe.sweep.local.Worker", Noted)
    monkeypatch.setattr("deepmoe.sweep.schedule.POLL_SECONDS", 0.0)
    monkeypatch.setattr("deepmoe.compare.taylor.JUDGED_IMAGES", 64)
    return started


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


def test_a_run_whose_checkpoint_is_gone_is_trained_again_for_those_that_need_it(
    swept, monkeypatch
) -> None:
    grid, folder = swept
    started = []

    class Failing(InThisProcess):
        returned = 1

        def begin(self, _: Sequence[str], log: Path) -> None:
            started.append(log.parent.name)

    monkeypatch.setattr("deepmoe.sweep.local.Worker", Failing)
    results = write_lines(folder / "some.jsonl", lines_of(folder / "runs.jsonl")["dense-seed0"])
    grid = Grid(grid.runs[:2], 2)
    assert not sweep(grid, folder / "elsewhere", results, command="test")
    assert started == ["dense-seed0"]  # it failed, so that the student was never started
    # Nor is one that was stopped on its way a network to take.
    last = CheckpointStore(folder / "elsewhere" / "dense-seed0", keep=0).last
    trained = load_checkpoint(folder / "runs" / "dense-seed0" / last.name)
    parts = (trained.model, trained.config, trained.info)
    save_checkpoint(last, *parts, TrainState(epoch=0))
    assert not sweep(grid, folder / "elsewhere", results, command="test")
    assert started == ["dense-seed0"] * 2
    save_checkpoint(last, *parts, trained.state)
    assert not sweep(grid, folder / "elsewhere", results, command="test")
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


def test_what_is_trained_again_for_its_checkpoint_keeps_its_place(swept, monkeypatch) -> None:
    """Else a sweep that is stopped has done all runs but those that need it."""
    grid, folder = swept
    started = []

    class Recorded(InThisProcess):
        returned = 1

        def begin(self, _: Sequence[str], log: Path) -> None:
            started.append(log.parent.name)

    monkeypatch.setattr("deepmoe.sweep.local.Worker", Recorded)
    student, dense, broken = grid.runs
    results = write_lines(folder / "one.jsonl", lines_of(folder / "runs.jsonl")["dense-seed0"])
    assert not sweep(Grid((dense, student, broken), 1), folder / "new", results, command="test")
    assert started == ["dense-seed0", "broken-seed0"]


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


def test_a_sweep_of_failures_ends_in_one_sentence(tmp_path: Path, monkeypatch) -> None:
    text = TINY.replace("[0, 1]", "[0]") + '"train.loss_limit" = 1e-6\n'
    command = ["sweep", str(write(tmp_path, text)), "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(main, [*command, "--jobs", "1", "--json"])
    assert done.exit_code == 2 and "have no result" in done.output
    assert not (tmp_path / "runs.jsonl").exists()


def test_a_grid_is_called_after_its_folder_or_its_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert grid_name(Path("recipes/grid.toml")) == "recipes"
    assert grid_name(Path("grid.toml")) == tmp_path.name
    assert grid_name(Path("recipes/widths.toml")) == "widths"


def test_runs_and_results_have_places_of_their_own(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    seen = []

    def note(grid: Grid, out: Path, results: Path, *, command: str, **_) -> bool:
        seen.append((out, results, command))
        return True

    monkeypatch.setattr("deepmoe.sweep.sweep", note)
    for name in ("grid.toml", "widths.toml"):
        (tmp_path / "mine" / name).write_text(TINY)
        assert CliRunner().invoke(main, ["sweep", f"mine/{name}"]).exit_code == 0
    results = Path("mine/runs.jsonl")
    assert seen == [
        (Path("runs/mine"), results, "deepmoe sweep mine/grid.toml"),
        (Path("runs/widths"), results, "deepmoe sweep widths.toml"),
    ]


def test_settings_on_the_command_line_hold_for_all_runs(tmp_path: Path) -> None:
    path = write(tmp_path, TINY + '[runs.a]\n[runs.b]\n"train.lr" = 0.5\n')
    grid = read_grid(path, ["train.lr=0.01", "data.root=elsewhere"])
    assert {run.config.train.lr for run in grid.runs} == {0.01}
    assert {run.config.data.root for run in grid.runs} == {"elsewhere"}
    done = CliRunner().invoke(main, ["sweep", str(path), "--set", "train.speed=1"])
    assert done.exit_code == 2 and "train.speed" in done.output
