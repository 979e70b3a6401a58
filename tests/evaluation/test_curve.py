"""Accuracy against cost from one trained model."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import tiny_config
from PIL import Image
from unsure_models import unsure

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.costs import count_costs, dense_macs
from deepmoe.errors import UserError
from deepmoe.evaluation import cost_curve, evaluate
from deepmoe.evaluation.curve import LEVELS
from deepmoe.evaluation.cut import refit_norms
from deepmoe.layers import GateHeads, RouteCodebook
from deepmoe.model import DeepMoE, confidence
from deepmoe.registry import create_model
from deepmoe.training import fit

BATCHES = [(torch.randn(n, 3, 16, 16), torch.randint(10, (n,))) for n in (5, 3)]


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


@pytest.mark.parametrize("gates", [None, "inner"])
def test_the_curve_of_exits_is_what_each_exit_gives_from_one_pass(gates: str | None) -> None:
    model, passes = unsure(gates), []
    with torch.no_grad():
        sure = torch.cat([confidence(model(x).embedding_logits) for x, _ in BATCHES])
    levels = [1.01, float(sure.median()), 0.0]  # one that an image has exactly, too
    first = model.network.get_submodule(model.gating.graph.layers[0].path)
    handle = first.register_forward_hook(lambda *_: passes.append(1))
    points = cost_curve(model, BATCHES, levels, by="exits")
    handle.remove()
    assert len(passes) == len(BATCHES)
    assert [p.threshold for p in points] == levels
    for point in points:
        model.exit_at = torch.tensor(point.threshold)
        expected = evaluate(model, BATCHES).as_dict()
        if point.threshold > 1 and not model.gated:  # nobody asks the embedding then
            expected |= {"macs": expected["dense_macs"], "macs_share": 1.0}
        assert point.result.as_dict() == pytest.approx(expected, rel=1e-9)
    assert [p.result.exited for p in points] == [0, 5 / 8, 1]
    assert points[-1].result.macs == count_costs(model, 16).embedding_macs


def test_a_curve_goes_by_what_a_model_has() -> None:
    def exited(model: DeepMoE) -> list[float | None]:
        return [p.result.exited for p in cost_curve(model, BATCHES)]

    model = unsure("inner")
    assert exited(model) == [None] * len(LEVELS["gates"])
    routes = torch.rand(2, sum(model.gating.widths))
    coded = model.with_gates(
        codebook=RouteCodebook(routes, torch.ones(routes.shape[1]), model.gating.widths)
    )
    leaving = unsure("inner")
    leaving.exit_at = torch.tensor(0.5)
    for other in (unsure(None), coded, leaving):
        shares = exited(other)
        assert len(shares) == len(LEVELS["exits"])
        assert shares[0] == 0 and shares == sorted(shares) and shares[-1] > 0


def test_what_no_curve_goes_by_is_refused() -> None:
    dense, model = create_model("vgg11", gates="none"), unsure(None)
    segments = create_model("drn_a_50", classes=3, wide=0.1)
    pixels = [(torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.long))]
    for tried, batches, options, words in (
        (dense, BATCHES, {"by": "exits"}, "no embedding"),
        (model, BATCHES, {"by": "gates"}, "no gates"),
        (model, BATCHES, {"by": "mood"}, "gates or exits"),
        (model, BATCHES, {"refit": object()}, "exits don't change it"),
        (segments, pixels, {"by": "exits"}, "segmentation has no exits"),
    ):
        with pytest.raises(UserError, match=words):
            cost_curve(tried, batches, **options)


def test_verbs_tell_who_has_answered(tmp_path: Path) -> None:
    config = tiny_config("model.gates=none", "model.exits=true", "train.finetune_epochs=0")
    run = fit(config, tmp_path / "run", quiet=True)
    image, path = tmp_path / "grey.png", tmp_path / "leaving.safetensors"
    Image.new("L", (8, 8), 200).save(image)
    trained = load_checkpoint(run.checkpoint)

    def told(exit_at: float, *arguments: object) -> str:
        trained.model.exit_at = torch.tensor(exit_at)
        save_checkpoint(path, trained.model, trained.config, trained.info, trained.state)
        done = CliRunner().invoke(main, [*map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.output

    costs = count_costs(trained.model, trained.info.size)
    for exit_at, by, active in ((0.0, "embedding", 0.0), (1.01, "network", 1.0)):
        assert by in told(exit_at, "predict", path, image)
        (answer,) = json.loads(told(exit_at, "predict", path, image, "--json"))
        assert (answer["answered_by"], answer["active"]) == (by, active)
        assert answer["macs"] == costs.embedding_macs + active * costs.macs
    assert "100.0%" in told(0.0, "eval", path).partition("exit rate")[2]
    assert (
        "answered by"
        not in CliRunner().invoke(main, ["predict", str(run.checkpoint), str(image)]).output
    )

    plot = tmp_path / "curve.png"
    points = json.loads(told(0.5, "curve", path, "--json", "--plot", plot))
    assert [p["threshold"] for p in points] == list(LEVELS["exits"])
    assert points[0]["macs_share"] == 1 and points[0]["exited"] == 0  # the base network alone
    assert points[0]["dense_macs"] == dense_macs(trained.model, trained.info.size)
    assert plot.stat().st_size > 0
    assert "exit rate" in told(0.5, "curve", path, "--thresholds", "0.9")
    for wrong in ("inf", "nan", "0.5,-1", "1e999"):  # JSON has no such numbers
        refused = CliRunner().invoke(main, ["curve", str(path), "--thresholds", wrong])
        assert refused.exit_code == 2
        assert "--thresholds must be finite, and not negative" in refused.stderr
