"""What a run leaves, and what it learns: from its images, from a start and from teachers."""

import json

import pytest
import torch
from helpers import assert_same_weights, tiny_config
from small_runs import run, without_time

from deepmoe.checkpoint import load_checkpoint
from deepmoe.errors import UserError
from deepmoe.training.log import read_metrics


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


def test_gate_heads_learn_at_a_rate_of_their_own(tmp_path) -> None:
    moved = {}
    for scale in (0.0, 1.0, 10.0):
        one_step = ("train.epochs=1", "train.finetune_epochs=0", "heads.init=ones")
        slow = ("train.lr=1e-5", "train.schedule=constant", "train.precision=64-true")
        config = tiny_config(*one_step, *slow, f"heads.lr_scale={scale}")
        weight = run(config, tmp_path / str(scale)).model.heads.weight
        moved[scale] = (weight.detach().double() - 1).abs().sum()
    assert moved[0.0] == 0 < moved[1.0]
    torch.testing.assert_close(moved[10.0], 10 * moved[1.0], rtol=0.05, atol=0)


def test_the_same_seed_gives_the_same_run_and_another_does_not(whole_run, tmp_path) -> None:
    again = run(tiny_config(), tmp_path / "again")
    assert_same_weights(again.checkpoint, whole_run.checkpoint)
    assert without_time(again.metrics) == without_time(whole_run.metrics)
    other = run(tiny_config("train.seed=1"), tmp_path / "other")
    assert without_time(other.metrics) != without_time(whole_run.metrics)


def test_tensorboard_gets_every_figure(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(tiny_config("train.tensorboard=true", "train.evaluate_epochs=3"), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("task_loss")] == [1, 2, 3, 4]
    assert [e.step for e in events.Scalars("accuracy")] == [3, 4]
    metrics = read_metrics(result.metrics)
    assert events.Scalars("loss")[0].value == pytest.approx(metrics[0]["loss"])
    assert ["accuracy" in m for m in metrics] == [False, False, True, True]


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
    base = [n for n in before if n.startswith("network.") and n.endswith("weight")]
    for name in base:
        assert not torch.equal(before[name], after[name]), name


def test_training_learns_and_sparsity_closes_gates(tmp_path) -> None:
    options = ["train.epochs=4", "train.finetune_epochs=0", "train.batch_size=32"]
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


def test_images_too_small_for_the_network_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match="8x8 px: it needs at least 32 px"):
        run(tiny_config("model.name=vgg11", "model.widths=[4,4,4,4,4,4,4,4]"), tmp_path)


def test_a_wrong_class_count_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"model.classes is 7, but the data \(digits\) has 10"):
        run(tiny_config("model.classes=7"), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match="no usable CUDA device"):
        run(tiny_config("train.device=cuda"), tmp_path)


def test_a_run_starts_from_another_and_learns_from_it(whole_run, tmp_path) -> None:
    before = load_checkpoint(whole_run.checkpoint).model.network.state_dict()
    path = whole_run.checkpoint
    taught = ["loss.distillation=1", f"train.teacher={path}", f"train.start={path}"]
    one_step = ["train.epochs=1", "train.finetune_epochs=0", "train.lr=1e-12"]
    config = tiny_config(*taught, *one_step, "train.weight_decay=0")
    result = run(config, tmp_path / "student")
    for name, tensor in result.model.network.named_parameters():
        torch.testing.assert_close(tensor.cpu(), before[name])
    assert read_metrics(result.metrics)[-1]["distillation_loss"] > 0
    wider = tiny_config(*taught, *one_step, "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]")
    with pytest.raises(UserError, match="widths"):
        run(wider, tmp_path / "wider")


def test_several_networks_teach_one(whole_run, tmp_path) -> None:
    path = str(whole_run.checkpoint)
    results = [
        run(
            tiny_config("loss.distillation=1", "train.epochs=1", f"train.teacher={t}"), tmp_path / n
        )
        for n, t in {"one": json.dumps(path), "two": json.dumps([path, path])}.items()
    ]
    one, two = (read_metrics(result.metrics)[-1]["distillation_loss"] for result in results)
    assert one == pytest.approx(two)
    with pytest.raises(UserError, match="at least one path"):
        tiny_config("loss.distillation=1", "train.teacher=[]")
    for wrong in ("3", "[a.safetensors, b.safetensors]"):
        with pytest.raises(UserError, match="list of paths in quotes"):
            tiny_config("loss.distillation=1", f"train.teacher={wrong}")


def test_a_trained_model_gets_a_codebook_by_a_frozen_stage_alone(whole_run, tmp_path) -> None:
    trained = load_checkpoint(whole_run.checkpoint).model
    settings = ("train.epochs=0", "train.finetune_epochs=1", "train.codes=3")
    result = run(tiny_config(*settings, f"train.start={whole_run.checkpoint}"), tmp_path)
    torch.testing.assert_close(result.model.heads.weight.cpu(), trained.heads.weight)
    for name, tensor in trained.embedding.state_dict().items():
        torch.testing.assert_close(result.model.embedding.state_dict()[name].cpu(), tensor)
    assert 1 <= len(result.model.codebook.codes) <= 3
    assert [m["stage"] for m in read_metrics(result.metrics)] == ["finetune"]


def test_a_frozen_stage_alone_meets_a_budget_and_needs_gates(whole_run, tmp_path) -> None:
    frozen = ("train.epochs=0", "train.finetune_epochs=1")
    start = f"train.start={whole_run.checkpoint}"
    result = run(tiny_config(*frozen, start, "train.target_macs=0.6"), tmp_path / "less")
    assert 0.5 < result.evaluation.macs_share < 0.61 < whole_run.evaluation.macs_share
    dense = run(tiny_config("model.gates=none", "train.epochs=1"), tmp_path / "dense")
    with pytest.raises(UserError, match="has no gates"):
        run(tiny_config(*frozen, f"train.start={dense.checkpoint}"), tmp_path / "gated")
    with pytest.raises(UserError, match="a different form"):
        run(tiny_config(start, "embedding.form=latent"), tmp_path / "latent")


def test_some_stage_must_train_and_the_frozen_one_needs_what_is_trained() -> None:
    with pytest.raises(UserError, match="not both be 0"):
        tiny_config("train.epochs=0", "train.finetune_epochs=0", "train.start=x.safetensors")
    with pytest.raises(UserError, match="without a joint stage"):
        tiny_config("train.epochs=0", "train.finetune_epochs=1")


def test_a_teacher_and_its_share_need_each_other() -> None:
    for alone in ("loss.distillation=0.5", "train.teacher=x.safetensors"):
        with pytest.raises(UserError, match="or neither"):
            tiny_config(alone)
