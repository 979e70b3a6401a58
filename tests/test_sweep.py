"""Many runs from one grid file."""

import json
from pathlib import Path

import pytest

from deepmoe.errors import UserError
from deepmoe.sweep import Grid, read_grid, result_path, summary, sweep

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
        ("preset = ", "TOML"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_grid(write(tmp_path, text))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Grid, Path]:
    folder = tmp_path_factory.mktemp("sweep")
    text = TINY.replace("[0, 1]", "[0]") + (
        '[runs.student]\n"train.start" = "run:dense"\n"train.teacher" = "run:dense"\n'
        '"loss.distillation" = 0.5\n[runs.dense]\n"model.gates" = "none"\n'
        '[runs.broken]\n"train.lr" = 900.0\n"train.loss_limit" = 1e-6\n'
    )
    grid = read_grid(write(folder, text))
    assert not sweep(grid, folder / "runs", folder / "results", command="test")
    return grid, folder


def test_runs_take_checkpoints_of_others_and_one_failure_stops_no_other(swept) -> None:
    grid, folder = swept
    student, dense, broken = (result_path(folder / "results", run) for run in grid.runs)
    assert not broken.exists()
    values = json.loads(student.read_text())["values"]
    assert values["last"]["epoch"] == 1 and values["last"]["distillation_loss"] > 0
    assert json.loads(dense.read_text())["values"]["last"]["distillation_loss"] == 0
    config = (folder / "runs" / "student-seed0" / "config.toml").read_text()
    assert str(folder / "runs" / "dense-seed0") in config
    assert "run:dense" in values["config"]


def test_what_has_a_result_is_left_alone_and_rows_hold_means(swept, monkeypatch) -> None:
    grid, folder = swept
    finished = Grid(grid.runs[:2], grid.jobs)
    monkeypatch.setattr("deepmoe.sweep._start", lambda *_: pytest.fail("started again"))
    assert sweep(finished, folder / "runs", folder / "results", command="test")
    rows = summary(grid, folder / "results")
    assert [row["run"] for row in rows] == ["student", "dense", "broken"]
    assert [row["seeds"] for row in rows] == [1, 1, 0]
    assert 0 <= rows[0]["accuracy"] <= 1 and rows[0]["macs_share"] < 1
