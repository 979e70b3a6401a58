import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import EmbeddingConfig
from deepmoe.costs import count_macs
from deepmoe.data import BatchLoader
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.evaluation import evaluate
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model
from deepmoe.training import FitResult, fit, learn_codebook
from deepmoe.training.log import read_metrics

PLANTED = 4  # routes


class EmbeddingFromPixels(nn.Module):
    """Takes the mixture weights from the first row of an image, so that a test can choose them."""

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, None]:
        return x_BCHW[:, 0, 0, :PLANTED], None


def planted_model(width: int) -> DeepMoE:
    """Mixture weight i alone runs the i-th of some random routes."""
    embedding = EmbeddingConfig(form="latent", dim=PLANTED, widths=(4,))
    model = create_model("resnet20", classes=10, widths=[width] * 9, embedding=embedding)
    model.embedding = EmbeddingFromPixels()
    with torch.no_grad():
        runs = torch.rand_like(model.heads.weight) < 0.5
        model.heads.weight.copy_(torch.where(runs, torch.rand(runs.shape) / 2 + 1, -1.0))
    return model


def images_of(e_BD: Tensor) -> Tensor:
    x_BCHW = torch.zeros(len(e_BD), 3, 8, 8)
    x_BCHW[:, 0, 0, :PLANTED] = e_BD
    return x_BCHW


def batches_of(e_BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(images_of(e), torch.zeros(len(e))) for e in e_BD.split(100)]


@pytest.mark.parametrize("width", [8, 64])  # 64: so many features that they are projected
def test_planted_routes_are_found(width: int) -> None:
    model = planted_model(width)
    route = torch.randint(PLANTED, (500,))
    e_BD = torch.eye(PLANTED)[route] * 0.8 + torch.rand(500, PLANTED) * 0.3
    codebook = learn_codebook(model, batches_of(e_BD), PLANTED, (8, 8))
    planted = torch.cat(model.heads(torch.eye(PLANTED)), dim=1) > 0
    gates = torch.cat(model.heads(e_BD), dim=1)
    assert not torch.equal(gates > 0, planted[route])  # the noise switches some channels
    assert {tuple(r) for r in (codebook.codes > 0).tolist()} == {tuple(r) for r in planted.tolist()}
    nearest = codebook.nearest(model.heads(e_BD))
    assert torch.equal((codebook.codes > 0)[nearest], planted[route])
    # A code's gates are the means of its images.
    for code in range(PLANTED):
        of_code = gates[nearest == code]
        mean = of_code.sum(dim=0) / (of_code > 0).sum(dim=0).clamp_min(1)
        torch.testing.assert_close(codebook.codes[code], mean * (codebook.codes[code] > 0))


def test_codes_cost_what_their_images_cost() -> None:
    model = planted_model(32)
    e_BD = torch.randn(600, PLANTED).mul(2).softmax(dim=1)
    gates = model.heads(e_BD)
    model.codebook = learn_codebook(model, batches_of(e_BD), 12, (8, 8))
    coded, _ = model.route(images_of(e_BD))
    free_macs, coded_macs = (count_macs(model.gating, 8, g).double() for g in (gates, coded))
    assert coded_macs.mean().item() == pytest.approx(free_macs.mean().item(), rel=0.02)
    assert len(coded_macs.unique()) <= 12


def test_a_channel_counts_by_what_it_costs() -> None:
    model = planted_model(8)
    e_BD = torch.rand(50, PLANTED)
    weight = learn_codebook(model, batches_of(e_BD), 2, (8, 8)).weight
    assert weight.mean().item() == pytest.approx(1)
    full = [torch.ones(1, 8) for _ in range(9)]
    dense = count_macs(model.gating, 8)
    saved = []
    for layer in range(9):
        without = [g.clone() for g in full]
        without[layer][0, 0] = 0
        saved.append(dense - count_macs(model.gating, 8, without).item())
    expected = torch.tensor(saved).repeat_interleave(8).float()
    torch.testing.assert_close(weight, expected / expected.mean())


def test_fewer_routes_give_fewer_codes() -> None:
    model = planted_model(8)
    e_BD = torch.eye(PLANTED)[:3].repeat(20, 1)
    codebook = learn_codebook(model, batches_of(e_BD), 8, (8, 8))
    assert len(codebook.codes) == 3
    gates = model.heads(e_BD)
    torch.testing.assert_close(codebook(gates), gates)


def test_the_same_seed_gives_the_same_codes_from_the_first_images() -> None:
    model = planted_model(8)
    e_BD = torch.rand(300, PLANTED)
    first = learn_codebook(model, batches_of(e_BD[:150]), 5, (8, 8), seed=3)
    model.codebook = first  # is not looked at
    again = learn_codebook(model, batches_of(e_BD), 5, (8, 8), seed=3, images=150)
    assert torch.equal(first.codes, again.codes)


def test_codes_that_cannot_be_learnt_are_named() -> None:
    model = planted_model(8)
    batches = batches_of(torch.rand(5, PLANTED))
    with pytest.raises(UserError, match="at least 1 code, not 0"):
        learn_codebook(model, batches, 0, (8, 8))
    with pytest.raises(UserError, match="6 codes can't be learnt from 5 images"):
        learn_codebook(model, batches, 6, (8, 8))
    with pytest.raises(UserError, match="no images to go through"):
        learn_codebook(model, [], 1, (8, 8))
    with pytest.raises(UserError, match="needs a gated model"):
        learn_codebook(create_model("resnet20", gates=None), batches, 2, (8, 8))


CODES = ("train.codes=4", "train.target_macs=0.6")


@pytest.fixture(scope="module")
def coded_run(tmp_path_factory) -> FitResult:
    return fit(tiny_config(*CODES), tmp_path_factory.mktemp("runs") / "coded", quiet=True)


def test_a_run_with_codes_is_saved_loaded_and_evaluated_alike(coded_run) -> None:
    codes = {tuple(code) for code in coded_run.model.codebook.codes.tolist()}
    assert 1 < len(codes) <= 4
    loaded = load_checkpoint(coded_run.checkpoint).model
    for name, tensor in coded_run.model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert evaluate(loaded, coded_run.data.evaluation) == coded_run.evaluation
    for x, _ in coded_run.data.evaluation:
        gates = torch.cat(loaded(x).gates, dim=1)
        assert {tuple(route) for route in gates.tolist()} <= codes


def test_codes_are_used_in_the_frozen_stage_alone(tmp_path) -> None:
    result = fit(tiny_config(*CODES, "train.keep_checkpoints=9"), tmp_path, quiet=True)
    codebooks = [load_checkpoint(p).model.codebook for p in sorted(tmp_path.glob("epoch-*"))]
    assert [c is not None for c in codebooks] == [False, False, True, True]
    assert torch.equal(codebooks[2].codes, codebooks[3].codes)
    assert read_metrics(result.metrics)[-1]["macs"] == result.evaluation.macs


def interrupt(monkeypatch, how: str, epoch: int, batch: int) -> None:
    """Before a batch, lets the process die without a word, or asks it by a signal to stop."""
    original = BatchLoader.epoch

    def interrupted(self, which, start=0):
        for i, item in enumerate(original(self, which, start), start):
            if (which, i) == (epoch, batch):
                if how == "die":
                    raise RuntimeError("died")
                os.kill(os.getpid(), signal.SIGTERM)
            yield item

    monkeypatch.setattr(BatchLoader, "epoch", interrupted)


@pytest.mark.parametrize(
    ("how", "epoch", "batch"), [("stop", 1, 2), ("die", 2, 0), ("stop", 2, 0), ("die", 3, 1)]
)
def test_an_interrupted_run_resumes_to_the_same_end(
    how, epoch, batch, coded_run, tmp_path, monkeypatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, how, epoch, batch)
        with pytest.raises(RuntimeError if how == "die" else TrainingInterrupted):
            fit(tiny_config(*CODES), tmp_path, quiet=True)
    saved = load_checkpoint(tmp_path / "last.safetensors")
    assert (saved.model.codebook is None) == ((how, epoch) in [("stop", 1), ("die", 2)])
    resumed = fit(tiny_config(*CODES), tmp_path, resume=True, quiet=True)
    ours, theirs = load_file(resumed.checkpoint), load_file(coded_run.checkpoint)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert resumed.evaluation == coded_run.evaluation


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions(precision: str, tmp_path) -> None:
    config = tiny_config(*CODES, f"train.precision={precision}", "train.epochs=1")
    result = fit(config, tmp_path, quiet=True)
    loaded = load_checkpoint(result.checkpoint).model
    assert torch.equal(loaded.codebook.codes, result.model.codebook.codes)
    again = fit(config, tmp_path, resume=True, quiet=True)
    assert again.evaluation == result.evaluation


@pytest.mark.parametrize("odd", [(3,), (4, 35), (0, 36), ()])
def test_odd_codes_in_a_checkpoint_are_named(odd: tuple[int, ...], coded_run, tmp_path) -> None:
    path = tmp_path / "odd.safetensors"
    _copy_with(coded_run.checkpoint, path, {"model.codebook.codes": torch.ones(odd)})
    with pytest.raises(UserError, match="does not fit its own model resnet20"):
        load_checkpoint(path)


def _copy_with(source: Path, target: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import safe_open

    with safe_open(source, framework="pt") as file:
        header = file.metadata()
    save_file({**load_file(source), **tensors}, target, header)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.codes=0"], "train.codes must lie from 1 to 65536, not be 0"),
        (["train.codes=4", "train.finetune_epochs=0"], "needs a frozen stage: set train.finetune"),
        (["train.codes=4", "model.gates=none"], "train.codes needs a gated model"),
    ],
)
def test_settings_that_do_not_go_together_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(*overrides)


def test_the_dense_twin_has_no_codes() -> None:
    assert tiny_config(*CODES).dense.train.codes is None


def test_too_many_codes_are_named_before_training(tmp_path) -> None:
    with pytest.raises(UserError, match=r"1000 codes can't be learnt from \d+ images"):
        fit(tiny_config("train.codes=1000"), tmp_path, quiet=True)
    assert not read_metrics(tmp_path / "metrics.jsonl")
