import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from safetensors.torch import load_file

from deepmoe.config import RunConfig
from deepmoe.errors import UserError
from deepmoe.training import FitResult, fit, load_checkpoint
from deepmoe.training.log import read_metrics

TESTS = Path(__file__).parents[1]


def run(config: RunConfig, out: Path, **options: bool) -> FitResult:
    return fit(config, out, quiet=True, **options)


def without_time(path: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(path)]


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> FitResult:
    return run(tiny_config(), tmp_path_factory.mktemp("runs") / "whole")


def test_a_run_leaves_checkpoint_metrics_and_configuration(whole_run) -> None:
    metrics = read_metrics(whole_run.metrics)
    assert [m["epoch"] for m in metrics] == [1, 2, 3, 4]
    assert [m["stage"] for m in metrics] == ["joint", "joint", "finetune", "finetune"]
    assert metrics[-1]["accuracy"] == whole_run.evaluation.accuracy
    assert metrics[-1]["evaluated_on"] == "test"
    assert (whole_run.checkpoint.parent / "config.toml").is_file()
    loaded = load_checkpoint(whole_run.checkpoint)
    assert loaded.config == tiny_config()
    assert loaded.state.epoch == 4
    assert not loaded.model.training
    for name, tensor in whole_run.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name])


def test_the_same_seed_gives_the_same_run_and_another_does_not(whole_run, tmp_path) -> None:
    again = run(tiny_config(), tmp_path / "again")
    assert_same_weights(again.checkpoint, whole_run.checkpoint)
    assert without_time(again.metrics) == without_time(whole_run.metrics)
    other = run(tiny_config("train.seed=1"), tmp_path / "other")
    assert without_time(other.metrics) != without_time(whole_run.metrics)


# The files of a run: 1 config.toml, 2 metrics.jsonl, then a checkpoint an epoch: 3, 4 | 5, 6.
@pytest.mark.parametrize(
    "point",
    [("batch", 0, 2), ("write", 3), ("batch", 1, 0), ("write", 4), ("batch", 2, 1), ("write", 6)],
    ids=lambda point: "-".join(map(str, point)),
)
def test_a_killed_run_resumes_to_the_same_weights(point, whole_run, tmp_path) -> None:
    script = TESTS / "training" / "killed_run.py"
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(
        [sys.executable, script, tmp_path, *map(str, point)],
        env=os.environ | threads | {"PYTHONPATH": paths},
    )
    assert killed.returncode == -signal.SIGKILL
    resumed = run(tiny_config(), tmp_path, resume=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole_run.metrics)


def test_a_metrics_line_cut_short_is_dropped(whole_run, tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole_run.metrics.read_text()[:-10])
    assert [m["epoch"] for m in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(tmp_path / "missing.jsonl") == []


def test_resuming_a_finished_run_changes_nothing(whole_run, tmp_path) -> None:
    first = run(tiny_config(), tmp_path)
    content = first.checkpoint.read_bytes()
    again = run(tiny_config(), tmp_path, resume=True)
    assert again.checkpoint.read_bytes() == content
    assert again.evaluation == first.evaluation
    assert without_time(again.metrics) == without_time(whole_run.metrics)


@pytest.mark.parametrize("form", ["classes", "latent"])
def test_the_frozen_stage_trains_the_base_network_alone(form: str, tmp_path) -> None:
    overrides = [f"embedding.form={form}", "train.weight_decay=0.01"]
    joint = run(tiny_config(*overrides, "train.finetune_epochs=0"), tmp_path / "joint")
    both = run(tiny_config(*overrides), tmp_path / "both")
    before, after = joint.model.state_dict(), both.model.state_dict()
    routing = [n for n in before if n.startswith(("embedding.", "heads."))]
    assert any("running_mean" in n for n in routing)
    for name in routing:
        assert torch.equal(before[name], after[name]), name
    base = [n for n in before if n.startswith("backbone.") and n.endswith("weight")]
    for name in base:
        assert not torch.equal(before[name], after[name]), name


def test_training_learns_and_sparsity_closes_gates(tmp_path) -> None:
    options = ["train.epochs=6", "train.finetune_epochs=0", "train.batch_size=32"]
    free = run(tiny_config(*options, "loss.sparsity=0"), tmp_path / "free").evaluation
    sparse = run(tiny_config(*options, "loss.sparsity=0.1"), tmp_path / "sparse").evaluation
    assert free.accuracy > 0.8
    assert sparse.active < free.active - 0.05
    assert sparse.macs < free.macs


def test_the_dense_twin_trains_by_the_same_code(tmp_path) -> None:
    twin = run(tiny_config().dense, tmp_path)
    assert twin.evaluation.active == 1.0
    assert twin.evaluation.macs == twin.evaluation.dense_macs
    assert twin.evaluation.embedding_accuracy is None
    assert load_checkpoint(twin.checkpoint).model.embedding is None


def test_noisy_top_k_trains(tmp_path) -> None:
    overrides = ["heads.kind=noisy-topk", "heads.init=normal(0, 1)", "loss.balance=0.01"]
    result = run(tiny_config(*overrides, "train.epochs=1", "train.finetune_epochs=0"), tmp_path)
    assert result.evaluation.active == pytest.approx(0.5)


def test_a_folder_in_use_is_kept(whole_run, tmp_path) -> None:
    run(tiny_config("train.epochs=1", "train.finetune_epochs=0"), tmp_path)
    with pytest.raises(UserError, match="holds a run already"):
        run(tiny_config(), tmp_path)
    with pytest.raises(UserError, match=r"other settings of train.epochs, train.finetune_epochs"):
        run(tiny_config(), tmp_path, resume=True)
    replaced = run(tiny_config(), tmp_path, overwrite=True)
    assert_same_weights(replaced.checkpoint, whole_run.checkpoint)


def test_images_too_small_for_the_network_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match="needs at least 32 px"):
        run(tiny_config("model.name=vgg11", "model.widths=[4,4,4,4,4,4,4,4]"), tmp_path)


def test_a_wrong_class_count_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"model.classes is 7, but the data \(digits\) has 10"):
        run(tiny_config("model.classes=7"), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match="no usable CUDA device"):
        run(tiny_config("train.device=cuda"), tmp_path)
