"""Runs that train experts: from a start, stopped and resumed, on a GPU, of one's own network."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_models import EXPERTS, Colours, mixture, model_of, of_colours
from helpers import assert_same_weights, tiny_config

from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import load_config
from deepmoe.data import open_data
from deepmoe.errors import TrainingInterrupted
from deepmoe.graph import evaluation_mode
from deepmoe.hard_moe import HardMoE
from deepmoe.losses import DeepMoELoss
from deepmoe.registry import create_model
from deepmoe.training import FitResult, fit
from deepmoe.training.experts import learn_centroids
from deepmoe.training.step import EagerStep, Objective
from deepmoe.training.teachers import Teachers
from deepmoe.training.trainer import Trainer


def test_a_run_trains_experts_and_leaves_the_features_alone(
    start: FitResult, whole_run: FitResult
) -> None:
    model = whole_run.model
    assert isinstance(model, HardMoE) and model.source.kept == start.model.source.kept is not None
    trained = start.model.network.state_dict()
    for name, value in model.embedding.network.state_dict().items():
        assert torch.equal(value, trained[name]), name
    experts = [expert.fc.weight for expert in model.network]
    for number, weight in enumerate(experts):
        assert not torch.equal(weight, trained["fc.weight"])
        assert not any(torch.equal(weight, other) for other in experts[:number])
    # Half of the dense MACs for the features, and as much for one expert.
    result = whole_run.evaluation
    assert result.dense_macs == start.evaluation.dense_macs
    twice = 2 * start.evaluation.macs
    assert result.macs == twice - (10 - EXPERTS) * model.embedding.dim
    momentum = load_checkpoint(whole_run.checkpoint).optimizer_state
    assert momentum and all(name.startswith("network.") for name in momentum)


def test_clusters_are_learnt_before_the_first_step(start: FitResult, whole_run: FitResult) -> None:
    """And stay: they are those of the start's features, of augmented training images."""
    config = mixture(start)
    data = open_data(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    twin = load_checkpoint(whole_run.checkpoint).model
    assert isinstance(twin, HardMoE)
    twin.centroids.zero_()
    learn_centroids(twin, data.train, config.train.seed)
    assert whole_run.model.has_centroids
    torch.testing.assert_close(twin.centroids, whole_run.model.centroids)


def test_a_run_that_was_stopped_ends_with_the_same_weights(
    start: FitResult, whole_run: FitResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = whole_run.checkpoint.with_name("epoch-0001.safetensors")
    (tmp_path / "epoch").mkdir()
    shutil.copy(first, tmp_path / "epoch" / "last.safetensors")
    resumed = fit(mixture(start), tmp_path / "epoch", resume=True, quiet=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert resumed.evaluation == whole_run.evaluation
    # Within an epoch, too.
    batches, run = iter([None, None, "stopped"]), tmp_path / "batch"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_wish", property(lambda _: next(batches, "stopped")))
        with pytest.raises(TrainingInterrupted, match="after batch 3 of epoch 1"):
            fit(mixture(start), run, quiet=True)
    resumed = fit(mixture(start), run, resume=True, quiet=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)


def test_the_configuration_that_a_run_leaves_names_all(whole_run: FitResult) -> None:
    left = load_config(whole_run.checkpoint.with_name("config.toml"))
    assert (left.model.experts, left.model.kept) == (EXPERTS, whole_run.model.source.kept)
    assert left.dense.model.experts is None


def test_a_run_may_go_on_from_such_a_model(whole_run: FitResult, tmp_path: Path) -> None:
    still = ("train.epochs=1", "train.lr=1e-12", "train.weight_decay=0")
    run = fit(mixture(whole_run, *still), tmp_path, quiet=True)
    assert torch.equal(run.model.centroids, whole_run.model.centroids)
    expected = dict(whole_run.model.named_parameters())
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name])


@pytest.mark.parametrize("taught", [False, True])
def test_on_a_gpu_its_steps_are_neither_compiled_nor_captured(
    taught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it learns itself, or others learn from it; other models' steps are."""
    mixed, plain = model_of()[0], create_model("resnet20", wide=0.25, classes=6)
    compiled: list[Objective] = []
    monkeypatch.setattr(Objective, "compile", lambda self, **_: compiled.append(self))
    monkeypatch.setattr("deepmoe.training.trainer.GraphedStep", lambda *_: "captured")
    fabric = SimpleNamespace(device=torch.device("cuda"), setup=lambda *parts: parts)
    monkeypatch.setattr(
        "deepmoe.training.trainer.EagerStep", lambda *_: EagerStep.__new__(EagerStep)
    )

    def step(model: Any, teachers: Teachers | None) -> object:
        trainer = SimpleNamespace(
            config=tiny_config(),
            fabric=fabric,
            model=model,
            teachers=teachers,
            optimizer=None,
            _loss=lambda _: DeepMoELoss(),
        )
        return Trainer.prepare(trainer, SimpleNamespace(frozen=False, by_turns=False))  # type: ignore[arg-type]

    made = step(plain, Teachers([mixed])) if taught else step(mixed, None)
    assert isinstance(made, EagerStep) and not compiled
    assert step(plain, None) == "captured" and len(compiled) == 1


def test_a_model_of_ones_own_network_is_trained(tmp_path: Path) -> None:
    """Its features are its own: no start is needed."""
    model, images = of_colours(experts=2), Colours([0.2, 1.5, 4.0])
    with evaluation_mode(model):
        before = model.embedding(images.x_BCHW)
    data: Any = list(zip(images.x_BCHW, (images.kinds > 1).long().tolist(), strict=True))
    config = tiny_config("train.epochs=1", "train.finetune_epochs=0", "train.batch_size=20")
    run = fit(model, data, data, config, tmp_path, quiet=True)
    assert run.model.has_centroids and torch.equal(run.model.embedding(images.x_BCHW), before)
    again = fit(of_colours(experts=2), data, data, config, tmp_path, resume=True, quiet=True)
    assert again.evaluation == run.evaluation
