"""Published runs can be read, and are of their grids; presets are what was measured."""

import json
import re
from pathlib import Path

import pytest

from deepmoe.config import apply_overrides, load_config
from deepmoe.sweep import RESULTS_NAME, read_grid, read_results
from deepmoe.sweep.grid import GRID_NAME, group_of, with_checkpoints

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SWEEPS = sorted(path.parent for path in EXPERIMENTS.glob(f"*/{RESULTS_NAME}"))


@pytest.mark.parametrize("folder", SWEEPS, ids=lambda folder: folder.name)
def test_published_runs_are_of_their_grids(folder: Path) -> None:
    grid = folder / GRID_NAME
    runs = {run.name: run for run in read_grid(grid).runs}
    results = read_results(folder / RESULTS_NAME)  # configurations of version 1, all of them
    assert results
    comment = " ".join(re.findall("^# Also in .*", grid.read_text(), flags=re.MULTILINE))
    for name, result in results.items():
        assert result.line["hardware"] and result.line["commit"] and result.line["command"]
        if name in runs:
            assert result.is_of(runs[name]), name
        else:  # it can't be trained any more
            assert group_of(name) in comment, name


# Runs of cifar100_best by their presets.
MEASURED = {
    "vgg16_cifar100_dense": "dense",
    "vgg16_cifar100_teacher": "teacher",
    "vgg16_cifar100_best": "best",
    "vgg16_w13_cifar100_dense": "w13_dense",
    "vgg16_w13_cifar100_teacher": "w13_teacher",
    "vgg16_w13_cifar100_best": "w13_best",
    "resnet56_cifar100_dense": "resnet56_dense",
    "resnet56_cifar100_teacher": "resnet56_wide_teacher",
    "resnet56_cifar100_best": "resnet56_best",
}


@pytest.mark.parametrize("preset", MEASURED)
def test_presets_are_what_was_measured(preset: str) -> None:
    runs = {
        run.name: run.config for run in read_grid(EXPERIMENTS / "cifar100_best" / GRID_NAME).runs
    }
    measured, config = runs[f"{MEASURED[preset]}-seed0"], load_config(preset)
    folders = {f"{run}-seed0": name for name, run in MEASURED.items()} | {
        "teacher-seed1": "vgg16_cifar100_teacher_1",
        "teacher-seed2": "vgg16_cifar100_teacher_2",
        "w13_teacher_too-seed1": "vgg16_w13_cifar100_teacher_1",
    }
    measured = with_checkpoints(measured, lambda run: f"runs/{folders[run]}/last.safetensors")
    # How often a run looks at itself changes nothing; nor do settings of gates without gates.
    free = [f"train.{key}" for key in ("compile", "evaluate_epochs", "checkpoint_epochs")]
    free.append("train.keep_checkpoints")
    if measured.model.gates == "none":
        free += ["heads.lr_scale", "loss.sparsity"]
    for key in free:
        table, name = key.split(".")
        value = getattr(getattr(measured, table), name)
        config = apply_overrides(config, [f"{key}={json.dumps(value)}"])
    assert config == measured
