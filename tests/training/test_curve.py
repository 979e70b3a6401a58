"""Accuracy against cost from one trained model."""

import copy
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import tiny_config

from deepmoe.bench.subjects import trained_subject
from deepmoe.cli import main
from deepmoe.config import HeadsConfig
from deepmoe.errors import UserError
from deepmoe.layers import GateHeads
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model
from deepmoe.sparse import sparsify
from deepmoe.training import fit, load_checkpoint
from deepmoe.training.checkpoint import save_checkpoint
from deepmoe.training.curve import cost_curve, cut_to, refit_norms
from deepmoe.training.evaluate import evaluate
from deepmoe.training.fit import FitResult


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> FitResult:
    """Gates far apart, so that there is an order among them."""
    config = tiny_config("heads.init=split(0.8, 0.5)", "train.random_threshold=1.2")
    return fit(config, tmp_path_factory.mktemp("curve") / "run", quiet=True)


def test_small_gates_are_closed_and_others_left_as_they_are() -> None:
    gates = (torch.tensor([[0.1, 0.5, 0.0]]), torch.tensor([[3.0, 1.0]]))
    heads = GateHeads(1, [3, 2])
    heads.weight.data = torch.cat(gates, dim=1).T.clone()
    whole = create_model("vgg11", classes=10)
    thresholds = torch.tensor([0.3, 0.3, 0.3, 2.0, 2.0])
    cut = DeepMoE(whole.embedding, heads, whole.backbone, thresholds=thresholds)
    assert cut.gates_side_by_side(torch.ones(1, 1)).tolist() == [[0.0, 0.5, 0.0, 3.0, 0.0]]


def test_cost_falls_as_the_threshold_rises(tmp_path: Path) -> None:
    result = fit(tiny_config("train.seed=3"), tmp_path / "run", quiet=True)
    points = cost_curve(result.model, result.data.evaluation, [0.0, 0.5, 1.0, 1e6])
    macs = [p.result.macs for p in points]
    assert macs == sorted(macs, reverse=True) and macs[0] > macs[1] > macs[-1]
    assert points[0].result == result.evaluation  # nothing closed: the model itself
    assert points[-1].result.active == 0
    plot, saved = tmp_path / "curve.png", tmp_path / "curve.json"
    arguments = ["curve", str(result.checkpoint), "--thresholds", "0,1", "--json"]
    arguments += ["--plot", str(plot), "--save", str(saved)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0 and plot.stat().st_size > 0
    printed = json.loads(done.output)
    assert [p["threshold"] for p in printed] == [0, 1]
    assert printed[1]["macs"] == pytest.approx(macs[2])
    written = json.loads(saved.read_text())
    assert written["values"] == printed and written["seed"] == 3
    assert written["command"] == "deepmoe curve last.safetensors --thresholds 0,1"


def test_norms_are_measured_anew_with_closed_gates(tmp_path: Path) -> None:
    result = fit(tiny_config("heads.init=normal(1, 0.5)"), tmp_path / "run", quiet=True)
    model, data = result.model, result.data
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = ["curve", str(result.checkpoint), "--thresholds", "0,1", "--json"]
    plain, refitted = (
        json.loads(CliRunner().invoke(main, [*arguments, *option]).output)
        for option in ([], ["--refit-norms"])
    )
    assert [p["macs"] for p in plain] == [p["macs"] for p in refitted]
    assert plain[1]["loss"] != refitted[1]["loss"]
    points = cost_curve(model, data.evaluation, [0.0, 1.0], data.train)
    assert points[1].result.loss == pytest.approx(refitted[1]["loss"], rel=1e-3)
    for name, tensor in model.state_dict().items():  # the model itself stays as it was
        assert torch.equal(tensor, before[name]), name

    seen: dict[torch.nn.Module, list[torch.Tensor]] = {}
    norms = [m for m in model.backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.register_forward_hook(lambda m, x, y: seen.setdefault(m, []).append(x[0]))
    refit_norms(model, data.train.epoch(0))
    # On augmented images, as in training: with no gate closed, that is the curve's first point.
    assert evaluate(model, data.evaluation).loss == pytest.approx(refitted[0]["loss"], rel=1e-3)
    seen = {norm: inputs[: data.train.batches_per_epoch] for norm, inputs in seen.items()}
    for norm in norms:
        torch.testing.assert_close(norm.running_mean, torch.cat(seen[norm]).mean(dim=(0, 2, 3)))
    assert not any(m.training for m in model.modules())
    assert {norm.momentum for norm in norms} == {0.1}


def test_a_model_is_cut_to_a_cost(trained: FitResult, tmp_path: Path) -> None:
    whole, images = trained.evaluation.macs_share, next(iter(trained.data.evaluation))[0]
    assert whole is not None
    command = ["cut", str(trained.checkpoint), "--json", "--macs"]
    path, smaller = (tmp_path / f"{name}.safetensors" for name in ("cut", "smaller"))
    done = CliRunner().invoke(main, [*command, f"{0.7 * whole}", "--out", str(path)])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.output)
    assert figures["macs_share"] == pytest.approx(0.7 * whole, rel=0.05)
    again = CliRunner().invoke(main, ["eval", str(path), "--json"])
    assert json.loads(again.output)["accuracy"] == figures["accuracy"]
    model = load_checkpoint(path).model
    output, sparse = model(images), sparsify(model)(images)
    torch.testing.assert_close(sparse.logits, output.logits, rtol=1e-3, atol=1e-3)
    routed, _ = trained.model.route(images)
    for g, of_whole in zip(output.gates, routed, strict=True):
        assert ((g == of_whole) | (g == 0)).all()
    # Thresholds never fall: what is cut can be cut further.
    done = CliRunner().invoke(
        main, ["cut", str(path), "--macs", f"{0.5 * whole}", "--out", str(smaller)]
    )
    assert done.exit_code == 0 and str(smaller) in done.output
    thresholds = [load_checkpoint(p).model.thresholds for p in (path, smaller)]
    assert thresholds[0] is not None and thresholds[1] is not None
    assert (thresholds[1] >= thresholds[0]).all() and (thresholds[1] > thresholds[0]).any()
    assert load_checkpoint(trained.checkpoint).model.thresholds is None


def test_a_cut_model_stays_cut_in_training(trained: FitResult, tmp_path: Path) -> None:
    whole, path = trained.evaluation.macs_share, tmp_path / "cut.safetensors"
    assert whole is not None
    share = f"{0.7 * whole}"
    CliRunner().invoke(main, ["cut", str(trained.checkpoint), "--macs", share, "--out", str(path)])
    settings = ("train.epochs=0", "train.finetune_epochs=1", "heads.init=split(0.8, 0.5)")
    config = tiny_config(f"train.start={path}", *settings)
    tuned = fit(config, tmp_path / "run", quiet=True)
    assert tuned.evaluation.macs_share == pytest.approx(0.7 * whole, rel=0.05)
    resumed = fit(config, tmp_path / "run", resume=True, quiet=True)
    assert resumed.evaluation == tuned.evaluation


def test_a_cut_model_is_a_start_in_any_precision_but_not_under_a_budget(
    trained: FitResult, tmp_path: Path
) -> None:
    path, data = tmp_path / "cut.safetensors", trained.data
    config = tiny_config("heads.init=split(0.8, 0.5)", "train.precision=64-true")
    share = 0.7 * (trained.evaluation.macs_share or 0)
    small, _ = cut_to(trained.model, data.info.size, share, data.calibration, data.train)
    state = load_checkpoint(trained.checkpoint).state
    save_checkpoint(path, small.double(), config, data.info, state)
    started = f"train.start={path}", "heads.init=split(0.8, 0.5)", "train.epochs=1"
    tuned = fit(tiny_config(*started), tmp_path / "run", quiet=True)
    thresholds = load_checkpoint(tuned.checkpoint).model.thresholds
    assert thresholds is not None and thresholds.dtype == torch.float32
    with pytest.raises(UserError, match="can't steer a model that deepmoe cut has made"):
        fit(tiny_config(*started, "train.target_macs=0.5"), tmp_path / "steered", quiet=True)


def test_cutting_leaves_the_whole_model_as_it_was(trained: FitResult) -> None:
    model, data = copy.deepcopy(trained.model).train(), trained.data
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    share = 0.7 * (trained.evaluation.macs_share or 0)
    small, threshold = cut_to(model, data.info.size, share, data.calibration, data.train)
    assert threshold > 0 and not any(m.training for m in small.modules())
    small.double()
    assert all(m.training for m in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_cut_model_is_benched_as_it_is(trained: FitResult, tmp_path: Path) -> None:
    path, share = tmp_path / "cut.safetensors", 0.6 * (trained.evaluation.macs_share or 0)
    command = ["cut", str(trained.checkpoint), "--macs", str(share), "--out", str(path)]
    assert CliRunner().invoke(main, command).exit_code == 0
    subject = trained_subject(path, batch=8, codes=2, device="cpu")
    gates, _ = subject.dynamic.route(subject.images)
    routed, _ = load_checkpoint(path).model.route(subject.images)
    assert gates is not None and routed is not None
    for g, expected in zip(gates, routed, strict=True):
        assert torch.equal(g, expected)
    assert subject.coded is not None and subject.coded.thresholds is not None


def test_closed_gates_keep_the_gradient_that_revives_them() -> None:
    model = create_model("vgg11", classes=10, heads=HeadsConfig(init="uniform(-1, 1)", revive=0.5))
    assert isinstance(model.heads, GateHeads)
    model.thresholds = torch.full((sum(model.heads.widths),), 0.3)
    e_BD = torch.full((2, model.heads.weight.shape[1]), 1 / model.heads.weight.shape[1])
    model.gates_side_by_side(e_BD).sum().backward()
    gates, gradient = model.heads.side_by_side(e_BD)[0], model.heads.weight.grad
    assert gradient is not None and (gates == 0).any() and (gates > 0).any()
    assert (gradient[gates == 0] > 0).all()
    assert (gradient[(gates > 0) & (gates < 0.3)] == 0).all()


def test_gates_that_are_all_alike_can_not_be_parted(tmp_path: Path) -> None:
    result = fit(tiny_config("heads.init=ones", "heads.lr_scale=0"), tmp_path / "run", quiet=True)
    command = ["cut", str(result.checkpoint), "--macs", "0.6", "--out", str(tmp_path / "cut")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and "too much alike" in done.output


def test_a_checkpoint_is_not_cut_onto_itself(trained: FitResult, tmp_path: Path) -> None:
    for out in (trained.checkpoint, tmp_path):
        command = ["cut", str(trained.checkpoint), "--macs", "0.4", "--out", str(out)]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 2 and "a file besides the checkpoint" in done.output


@pytest.mark.parametrize("share", ["0.001", "5", "nan"])
def test_costs_out_of_reach_are_refused(trained: FitResult, tmp_path: Path, share: str) -> None:
    command = ["cut", str(trained.checkpoint), "--macs", share, "--out", str(tmp_path / "cut")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and "closing gates can't reach" in done.output
    assert not (tmp_path / "cut").exists()


def test_a_dense_network_is_refused() -> None:
    with pytest.raises(UserError, match="no gates"):
        cost_curve(create_model("vgg11", gates="none"), [], [0.0])
