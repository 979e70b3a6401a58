"""Runs from a grid file."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from small_sweeps import TINY, write

from deepmoe.cli import main
from deepmoe.errors import UserError
from deepmoe.sweep import Grid, grid_name, read_grid
from deepmoe.sweep.grid import with_checkpoints


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
    text = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text(encoding="utf-8")
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
