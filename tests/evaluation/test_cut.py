"""Cheaper models from trained ones."""

import copy
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import tiny_config

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.errors import UserError
from deepmoe.evaluation import cut_to, evaluate
from deepmoe.registry import create_model
from deepmoe.sparse import sparsify
from deepmoe.training import FitResult, fit

SETTINGS = ("heads.init=ones", "train.finetune_epochs=1", "train.batch_size=64")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> FitResult:
    """All gates open, and none above the others: what matters is what channels do."""
    return fit(tiny_config(*SETTINGS), tmp_path_factory.mktemp("cut") / "run", quiet=True)


def cut(checkpoint: Path, share: float, out: Path, *options: str):
    command = ["cut", str(checkpoint), "--macs", str(share), "--out", str(out), *options]
    return CliRunner().invoke(main, command)


def test_a_model_is_cut_to_a_cost(trained: FitResult, tmp_path: Path) -> None:
    images, whole = next(iter(trained.data.evaluation))[0], trained.evaluation.macs_share
    path, smaller = (tmp_path / f"{name}.safetensors" for name in ("cut", "smaller"))
    done = cut(trained.checkpoint, 0.7 * whole, path, "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert 0.67 * whole < figures["macs_share"] <= 0.7 * whole
    again = CliRunner().invoke(main, ["eval", str(path), "--json"])
    assert json.loads(again.output)["accuracy"] == figures["accuracy"]
    model = load_checkpoint(path).model
    output, sparse = model(images), sparsify(model)
    torch.testing.assert_close(sparse(images).logits, output.logits, rtol=1e-3, atol=1e-3)
    routed, _ = trained.model.route(images)
    for g, of_whole in zip(output.gates, routed, strict=True):
        assert ((g == of_whole) | (g == 0).all(dim=0)).all()  # closed for all, or left alone
    # Closed channels are gone from the sparse model, and what is cut can be cut further.
    layers = sparse.program.layers.values()
    kept = sum(len(layer.weight) for layer in layers if layer.outs is not None)
    assert kept == sum(int((g > 0).any(dim=0).sum()) for g in output.gates)
    done = cut(path, 0.5 * whole, smaller)
    assert done.exit_code == 0 and str(smaller) in done.output
    further = load_checkpoint(smaller).model.heads.weight.amax(dim=1) > 0
    before = model.heads.weight.amax(dim=1) > 0
    assert (further <= before).all() and further.sum() < before.sum()


def test_channels_that_matter_least_go_first(trained: FitResult) -> None:
    model, data = copy.deepcopy(trained.model), trained.data
    with torch.no_grad():  # what reads every other channel of each block makes nothing of it
        for path in model.gating.names:
            model.network.get_submodule(path.replace("conv1", "conv2")).weight[:, ::2] = 0.0
    small = cut_to(model, data.info.size, 0.75, data.calibration, data.train)
    closed = (small.heads.weight.amax(dim=1) <= 0).view(9, 4)
    assert closed[:, ::2].sum() == closed.sum() > 0


def test_norms_are_measured_anew(trained: FitResult) -> None:
    data, share = trained.data, 0.6 * trained.evaluation.macs_share
    small = cut_to(trained.model, data.info.size, share, data.calibration, data.train)
    stale = copy.deepcopy(small)
    stale.network.load_state_dict(trained.model.network.state_dict())
    assert evaluate(small, data.evaluation).loss < evaluate(stale, data.evaluation).loss
    assert not any(m.training for m in small.modules())


def test_codes_are_cut_too(trained: FitResult, tmp_path: Path) -> None:
    settings = ("train.epochs=0", "train.finetune_epochs=1", "train.codes=2")
    config = tiny_config(*SETTINGS, *settings, f"train.start={trained.checkpoint}")
    coded = fit(config, tmp_path / "coded", quiet=True)
    done = cut(coded.checkpoint, 0.6, tmp_path / "cut.safetensors", "--json")
    assert done.exit_code == 0, done.output
    assert 0.57 < json.loads(done.stdout)["macs_share"] <= 0.6
    model = load_checkpoint(tmp_path / "cut.safetensors").model
    assert model.codebook is not None and (model.codebook.codes == 0).all(dim=0).any()


def test_a_cut_model_can_be_trained_on(trained: FitResult, tmp_path: Path) -> None:
    share = 0.7 * trained.evaluation.macs_share
    cut(trained.checkpoint, share, tmp_path / "cut.safetensors")
    settings = (*SETTINGS, f"train.start={tmp_path / 'cut.safetensors'}", "train.epochs=0")
    tuned = fit(tiny_config(*settings), tmp_path / "run", quiet=True)
    assert tuned.evaluation.macs_share == pytest.approx(share, rel=0.05)


def test_cutting_leaves_the_whole_model_as_it_was(trained: FitResult) -> None:
    model, data = copy.deepcopy(trained.model).train(), trained.data
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cut_to(model, data.info.size, 0.7, data.calibration, data.train)
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_checkpoint_is_not_cut_onto_itself(trained: FitResult, tmp_path: Path) -> None:
    for out in (trained.checkpoint, tmp_path):
        done = cut(trained.checkpoint, 0.4, out)
        assert done.exit_code == 2 and "already exists" in done.output


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.001, "closing channels can't reach 0.001"),
        (1.9, "closing channels can't reach 1.9"),
        (40, "a share of the dense MACs, such as 0.4, not 40"),
        (float("nan"), "a share of the dense MACs"),
    ],
)
def test_costs_out_of_reach_are_refused(trained, tmp_path: Path, share: float, words: str) -> None:
    done = cut(trained.checkpoint, share, tmp_path / "cut")
    assert done.exit_code == 2 and words in done.output
    assert not (tmp_path / "cut").exists()


def test_exits_are_fitted_after_a_cut_and_not_before(trained: FitResult) -> None:
    """A threshold that was fitted for the whole model says nothing of the cut one."""
    model, data = copy.deepcopy(trained.model), trained.data
    model.exit_at = torch.tensor(0.5)
    with pytest.raises(UserError, match="cut the model without exits, then fit exits"):
        cut_to(model, data.info.size, 0.7, data.calibration, data.train)


def test_models_without_gates_to_close_are_refused(trained: FitResult) -> None:
    noisy = tiny_config("heads.kind=noisy-topk").heads
    dense, topk = create_model("vgg11", gates="none"), create_model("vgg11", heads=noisy)
    for model, words in ((dense, "has no gates"), (topk, "relu heads or a codebook")):
        with pytest.raises(UserError, match=words):
            cut_to(model, 32, 0.5, [], trained.data.train)


def test_a_model_that_an_earlier_version_has_cut_is_used_as_it_is(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "version1" / "cut.safetensors"
    old = load_checkpoint(path)
    assert old.model.thresholds is not None
    images = torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        expected = old.model(images)
        torch.testing.assert_close(sparsify(old.model)(images).logits, expected.logits)
    whole, _ = old.model.with_gates().route(images)
    assert any(((g == 0) & (w > 0)).any() for g, w in zip(expected.gates, whole, strict=True))
    save_checkpoint(tmp_path / "again", old.model, old.config, old.info, old.state)
    again = load_checkpoint(tmp_path / "again").model
    assert torch.equal(again.thresholds, old.model.thresholds)
