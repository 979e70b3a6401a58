from dataclasses import replace

import pytest
import torch
from helpers import slow, tiny_config

from deepmoe.budget import MacsBudget
from deepmoe.config import load_config
from deepmoe.configured_models import model_from_config
from deepmoe.costs import active_share, count_macs
from deepmoe.errors import UserError
from deepmoe.layers.heads import initialise
from deepmoe.registry import create_model
from deepmoe.training import fit
from deepmoe.training.log import read_metrics

SMALL = (
    "model.widths=[16, 16, 16, 16, 16, 16, 16, 16, 16]",
    "loss.sparsity=0",
    "train.epochs=5",
    "train.finetune_epochs=1",
    "train.batch_size=64",
)


@pytest.mark.parametrize(
    ("target", "init", "form"),
    [
        (0.3, "ones", "classes"),
        slow(0.7, "normal(1, 0.5)", "classes"),
        (0.5, "uniform(-2, 0.2)", "classes"),  # starts with nearly everything closed
        slow(0.5, "normal(1, 0.3)", "latent"),
        slow(0.5, "split(0.6)", "classes"),
    ],
)
def test_a_run_ends_within_two_percent_of_its_target(target, init, form, tmp_path) -> None:
    config = tiny_config(
        *SMALL, f"train.target_macs={target}", f"heads.init={init}", f"embedding.form={form}"
    )
    result = fit(config, tmp_path, quiet=True)
    assert result.evaluation.macs_share == pytest.approx(target, rel=0.02)
    with torch.no_grad():
        gates = [result.model(x).gates for x, _ in result.data.evaluation]
    for layer in zip(*gates, strict=True):
        share = active_share([torch.cat(layer)]).mean()
        assert share >= 0.9 * config.train.channel_floor  # no layer is dead


def test_a_target_may_be_a_number_of_macs(tmp_path) -> None:
    dense = count_macs(create_model("resnet20", widths=[16] * 9, classes=10).gating, 8)
    config = tiny_config(*SMALL, f"train.target_macs={dense // 2}")
    result = fit(config, tmp_path, quiet=True)
    assert result.evaluation.macs == pytest.approx(dense / 2, rel=0.02)


def make_budget(target: float, **options: object) -> tuple[MacsBudget, torch.nn.Module]:
    model = create_model("resnet20", classes=10)
    torch.nn.init.normal_(model.heads.weight, 1.0, 0.5)
    return MacsBudget(model, 16, target, **{"steps": 1000, **options}), model


def test_thresholds_move_gates_as_a_bias_would() -> None:
    budget, model = make_budget(0.5)
    e = torch.randn(5, 10).softmax(dim=1)
    before = e @ model.heads.weight.T
    with torch.no_grad():
        budget._raise_thresholds(torch.arange(9).double() / 10)
    after = torch.cat(model.heads(e), dim=1)
    expected = torch.relu(before - (budget.layer_of.float() / 10))
    torch.testing.assert_close(after, expected)


def test_steps_close_what_is_too_much_and_open_what_is_too_little() -> None:
    budget, model = make_budget(0.5)
    e = torch.randn(64, 10).softmax(dim=1)

    def share() -> float:
        return float(count_macs(model, 16, model.heads(e)).double().mean() / budget.dense)

    def steps(count: int) -> None:
        for _ in range(count):
            budget.step(model.heads(e), progress=1.0)

    steps(400)
    assert share() == pytest.approx(0.5, rel=0.03)
    with torch.no_grad():
        model.heads.weight.sub_(10.0)  # every gate dies at once
    assert share() < 0.2
    steps(1000)
    assert share() == pytest.approx(0.5, rel=0.03)


def test_the_goal_sinks_from_dense_to_the_target() -> None:
    budget, _ = make_budget(0.4)
    goals = [budget.goal(progress) for progress in (0.0, 0.1, 0.35, 0.6, 1.0)]
    assert goals == pytest.approx([1.0, 1.0, 0.7, 0.4, 0.4])
    at_once, _ = make_budget(0.4, ramp=(0.0, 0.0))
    assert [at_once.goal(progress) for progress in (0.0, 1.0)] == pytest.approx([0.4, 0.4])


def test_open_gates_are_held_at_one_on_average() -> None:
    budget, model = make_budget(0.5)
    e = torch.randn(64, 10).softmax(dim=1)
    with torch.no_grad():
        model.heads.weight.mul_(0.01)
    for _ in range(1500):
        budget.step(model.heads(e), progress=1.0)
    with torch.no_grad():
        for g in model.heads(e):
            assert float(g[g > 0].mean()) == pytest.approx(1.0, rel=0.1)


@torch.no_grad()
def test_layers_that_are_closed_come_back_without_a_leap() -> None:
    budget, model = make_budget(0.5)
    torch.nn.init.normal_(model.heads.weight, -1.0, 0.01)
    e, largest = torch.randn(64, 10).softmax(dim=1), 0.0
    for _ in range(400):
        gates = model.heads(e)
        largest = max(largest, *(float(g.max()) for g in gates))
        budget.step(gates, progress=1.0)
    assert largest < 50
    assert float(count_macs(model, 16, gates).double().mean()) > 0.3 * budget.dense


@torch.no_grad()
def test_closed_gates_do_not_sink_beyond_return() -> None:
    budget, model = make_budget(0.55)
    for of_layer in model.heads.weight.split(model.heads.widths):
        initialise(of_layer, "split(0.8)")  # too much for the target
    e = torch.randn(64, 10).softmax(dim=1)
    for _ in range(400):
        budget.step(model.heads(e), progress=1.0)
    assert float((e @ model.heads.weight.T).min()) > -20


def test_layers_at_their_floor_are_only_opened() -> None:
    budget, model = make_budget(0.5, floor=0.2)
    e = torch.randn(64, 10).softmax(dim=1)
    with torch.no_grad():
        model.heads.weight[budget.layer_of == 0] -= 10.0
    for _ in range(1500):
        budget.step(model.heads(e), progress=1.0)
    assert float((model.heads(e)[0] > 0).float().mean()) > 0.15


@pytest.mark.parametrize("target", [0.01, 1.5e9])
def test_targets_out_of_reach_are_refused(target: float) -> None:
    with pytest.raises(UserError, match="can't be met"):
        make_budget(target)


def test_a_budget_needs_relu_heads(tmp_path) -> None:
    heads = ["heads.kind=noisy-topk", "heads.init=normal(0, 1)"]
    with pytest.raises(UserError, match="relu heads"):
        fit(tiny_config(*heads, "train.target_macs=0.5"), tmp_path)


def test_calibration_closes_the_weakest_gates_and_leaves_all_others() -> None:
    model = create_model("resnet20", classes=10).eval()
    torch.nn.init.normal_(model.heads.weight, 1.0, 0.1)  # near one: no threshold parts them
    budget = MacsBudget(model, 16, 0.6, steps=10, floor=0.3)
    batches = [(torch.randn(64, 3, 16, 16), torch.zeros(64))]
    with torch.no_grad():
        before = torch.cat(model.route(batches[0][0])[0], dim=1)
        budget.calibrate(model, batches)
        gates = model.route(batches[0][0])[0]
        after = torch.cat(gates, dim=1)
    share = float(count_macs(model, 16, gates).double().mean() / budget.dense)
    assert 0.592 < share <= 0.6  # within what one gate costs
    closed = (after == 0).all(dim=0)
    assert torch.equal(after[:, ~closed], before[:, ~closed])
    means = before.mean(dim=0).split(model.heads.widths)
    for of_layer, off in zip(means, closed.split(model.heads.widths), strict=True):
        assert 0.3 <= float((~off).float().mean()) < 1
        assert float(of_layer[off].max()) <= float(of_layer[~off].min())
    assert torch.equal(model.heads.weight.amax(dim=1) > 0, ~closed)  # and can be removed for good


@pytest.mark.parametrize(("floor", "target"), [(0.05, 0.3), (0.3, 0.45)])
@torch.no_grad()
def test_gates_that_differ_by_image_meet_a_target_and_layers_keep_their_floor(
    floor: float, target: float
) -> None:
    model = create_model("resnet20", classes=10).eval()
    torch.nn.init.normal_(model.heads.weight, 0.3, 1.0)  # they differ from image to image
    model.embedding.project.weight.mul_(30)
    budget = MacsBudget(model, 16, target, steps=10, floor=floor)
    batches = [(torch.randn(256, 3, 16, 16), torch.zeros(256))]
    budget.calibrate(model, batches)
    gates = model.route(batches[0][0])[0]
    share = float(count_macs(model, 16, gates).double().mean() / budget.dense)
    assert share == pytest.approx(target, rel=0.05)
    for g in gates:
        assert float((g > 0).float().mean()) >= floor - 1 / 256  # to an image


@pytest.mark.parametrize("batch_size", [64, 480])  # 19 and 2 steps an epoch
def test_a_budget_acts_in_a_run_of_two_epochs_too(batch_size: int, tmp_path) -> None:
    """As a new user would try it: nothing set but the target."""
    settings = ("train.epochs=2", "train.finetune_epochs=0", f"train.batch_size={batch_size}")
    config = load_config(
        "quickstart", ["loss.sparsity=0", "train.target_macs=0.5", "data.size=8", *settings]
    )
    config = replace(config, heads=replace(config.heads, init=None))
    result = fit(config, tmp_path, quiet=True)
    first, second = (line["macs_share"] for line in read_metrics(result.metrics))
    assert 0.5 < first < 0.8
    assert second == pytest.approx(0.5, rel=0.02)


@torch.no_grad()
def test_little_is_left_to_do_when_a_budget_is_calibrated() -> None:
    model = model_from_config(tiny_config("train.target_macs=0.5", "heads.init=split(1, 0.5)"), 10)
    budget = MacsBudget(model, 8, 0.5, steps=14)
    images = torch.randn(64, 3, 8, 8)
    for step in range(14):
        gates, _ = model.route(images)
        assert gates is not None
        budget.step(gates, (step + 1) / 14)
    gates, _ = model.eval().route(images)
    assert gates is not None
    share = float(count_macs(model, 8, gates).double().mean() / budget.dense)
    assert share == pytest.approx(0.5, abs=0.05)
