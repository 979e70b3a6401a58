"""What a comparison plans: its rows, their runs and settings."""

from pathlib import Path

from deepmoe.compare import method_named
from deepmoe.comparison import comparison_grid, open_comparison, rows_of


def test_published_schedules_are_rows_of_their_own(preset: Path) -> None:
    methods = [method_named(name) for name in ("li", "dense")]
    asked = open_comparison(
        methods, shares=(0.6, 0.7), preset=str(preset), seeds=(0, 1), published=True
    )
    rows = rows_of(asked)
    assert [row.name for row in rows] == [
        "li-60",
        "li-70",
        "li_published-60",
        "li_published-70",
        "dense",
    ]
    own, theirs = rows[0].steps[-1].config.train, rows[2].steps[-1].config.train
    assert (own.epochs, theirs.epochs, theirs.schedule) == (1, 40, "constant")
    grid = comparison_grid(asked, rows, jobs=3)
    assert len(grid.runs) == 2 * 6 and grid.jobs == 3  # the start of each seed comes with them
    assert {run.needs[0] for run in grid.runs if run.needs} == {"start-seed0", "start-seed1"}
    seeds = [run.config.train.seed for run in grid.runs]
    assert seeds == [0] * 6 + [1] * 6  # stopped early, it has a whole table of one seed
    epochs = [run.config.train.total_epochs for run in grid.runs if run.config.train.seed == 0]
    assert epochs == sorted(epochs, reverse=True) and epochs[0] > epochs[-1]


def test_slimming_trains_under_its_penalty_by_the_published_schedule_too(preset: Path) -> None:
    asked = open_comparison(
        [method_named("slimming")], shares=(0.6,), preset=str(preset), published=True
    )
    _, theirs = rows_of(asked)
    penalised, retrained = (step.config for step in theirs.steps)
    for train in (penalised.train, retrained.train):
        assert (train.epochs, train.batch_size, train.milestones) == (160, 64, (80, 120))
    assert penalised.loss.norm_sparsity > 0 == retrained.loss.norm_sparsity


def test_settings_of_the_schedule_are_of_the_retraining(preset: Path) -> None:
    methods = [method_named(name) for name in ("li", "thin-long")]
    asked = open_comparison(
        methods, shares=(0.5,), preset=str(preset), overrides=["train.epochs=3", "train.lr=0.02"]
    )
    assert asked.start is not None
    assert (asked.start.train.epochs, asked.start.train.lr) == (1, 0.1)
    assert [row.steps[-1].config.train.epochs for row in rows_of(asked)] == [3, 2]


def test_teachers_are_trained_first(preset: Path) -> None:
    asked = open_comparison(
        [method_named("taylor")],
        shares=(0.6,),
        preset=str(preset),
        seeds=(0, 1),
        teacher_preset=str(preset),
    )
    grid = comparison_grid(asked, rows_of(asked), jobs=1)
    names = [run.name for run in grid.in_order]
    taught = next(run for run in grid.runs if run.name == "taylor-60-seed1")
    assert taught.lessons == ["teacher-seed0", "teacher-seed1"]
    assert taught.config.loss.distillation == 0.9
    assert max(map(names.index, taught.lessons)) < names.index(taught.name)


def test_distillation_can_be_set(compared: Path) -> None:
    start = compared / "start-seed0" / "last.safetensors"
    asked = open_comparison(
        [method_named("li")],
        shares=[0.7],
        start=start,
        teachers=[start],
        overrides=["loss.distillation=0.3"],
    )
    (row,) = rows_of(asked)
    assert row.steps[-1].config.loss.distillation == 0.3


def test_costs_that_are_named_alike_are_one(preset: Path) -> None:
    shares = (0.6, 0.7, 0.6 + 1e-13)
    asked = open_comparison([method_named("li")], shares=shares, preset=str(preset))
    assert [row.name for row in rows_of(asked)] == ["li-60", "li-70"]
    assert len(comparison_grid(asked, rows_of(asked), jobs=1).runs) == 3
