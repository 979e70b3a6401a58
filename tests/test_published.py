"""Published results are of their grids, and presets are what was measured."""

import json
import tomllib
from pathlib import Path

import pytest

from deepmoe.config import apply_overrides, config_from_dict, load_config
from deepmoe.sweep import read_grid
from deepmoe.sweep.grid import with_checkpoints

ROOT = Path(__file__).parents[1]
GRIDS = sorted((ROOT / "sweeps").glob("*.toml"))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_published_results_are_of_their_grids(path: Path) -> None:
    runs = {run.name: run.config for run in read_grid(path).runs}
    results = sorted((ROOT / "results" / path.stem).glob("*.json"))
    assert results
    for result in results:
        values = json.loads(result.read_text())["values"]
        assert values["run"] == result.stem
        assert config_from_dict(tomllib.loads(values["config"])) == runs[result.stem], result


# Runs of sweeps/cifar100_best.toml by their presets.
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
    runs = {run.name: run.config for run in read_grid(ROOT / "sweeps/cifar100_best.toml").runs}
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
