"""Accuracy against cost from one trained model."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import tiny_config

from deepmoe.cli import main
from deepmoe.errors import UserError
from deepmoe.evaluation import cost_curve, evaluate
from deepmoe.evaluation.cut import refit_norms
from deepmoe.layers import GateHeads
from deepmoe.registry import create_model
from deepmoe.training import fit


def test_small_gates_are_closed_and_others_left_as_they_are() -> None:
    gates = (torch.tensor([[0.1, 0.5, 0.0]]), torch.tensor([[3.0, 1.0]]))
    heads = GateHeads(1, [3, 2])
    heads.weight.data = torch.cat(gates, dim=1).T.clone()
    whole = create_model("vgg11", classes=10)
    thresholds = torch.tensor([0.3, 0.3, 0.3, 2.0, 2.0])
    cut = whole.with_gates(heads, thresholds=thresholds)
    assert cut.concatenated_gates(torch.ones(1, 1)).tolist() == [[0.0, 0.5, 0.0, 3.0, 0.0]]


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
    norms = [m for m in model.network.modules() if isinstance(m, torch.nn.BatchNorm2d)]
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


def test_a_dense_network_is_refused() -> None:
    with pytest.raises(UserError, match="no gates"):
        cost_curve(create_model("vgg11", gates="none"), [], [0.0])
