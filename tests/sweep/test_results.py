"""One line a run: what is written, kept and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_sweeps import TINY, lines_of, returning, write, write_lines

from deepmoe.cli import main
from deepmoe.config import apply_overrides
from deepmoe.errors import UserError
from deepmoe.sweep import Grid, Run, read_results, summary, sweep


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


def test_a_sweep_of_failures_ends_in_one_sentence(tmp_path: Path, monkeypatch) -> None:
    text = TINY.replace("[0, 1]", "[0]") + '"train.loss_limit" = 1e-6\n'
    command = ["sweep", str(write(tmp_path, text)), "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(main, [*command, "--jobs", "1", "--json"])
    assert done.exit_code == 2 and "have no result" in done.output
    assert not (tmp_path / "runs.jsonl").exists()
