import pytest
import torch
from helpers import tiny_config

from deepmoe.config import HeadsConfig, TrainConfig
from deepmoe.costs import active_share, count_macs
from deepmoe.errors import UserError
from deepmoe.layers.heads import initialise
from deepmoe.registry import create_model
from deepmoe.sparse import sparsify
from deepmoe.training import fit, load_checkpoint
from deepmoe.training.budget import MacsBudget

SMALL = (
    "model.widths=[16, 16, 16, 16, 16, 16, 16, 16, 16]",
    "loss.sparsity=0",
    "train.epochs=10",
    "train.finetune_epochs=1",
    "train.batch_size=64",
)


@pytest.mark.parametrize(
    ("target", "init", "form"),
    [
        (0.3, "ones", "classes"),
        (0.5, "uniform(-0.5, 1)", "classes"),
        (0.7, "normal(1, 0.5)", "classes"),
        (0.5, "uniform(-2, 0.2)", "classes"),  # starts with nearly everything closed
        (0.5, "normal(1, 0.3)", "latent"),
        (0.5, "split(0.6)", "classes"),
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
    dense = count_macs(create_model("resnet20", widths=[16] * 9, classes=10).backbone, 8)
    config = tiny_config(*SMALL, f"train.target_macs={dense // 2}", "train.budget_by_cost=true")
    result = fit(config, tmp_path, quiet=True)
    assert result.evaluation.macs == pytest.approx(dense / 2, rel=0.02)


def make_budget(target: float, **train: object) -> tuple[MacsBudget, torch.nn.Module]:
    model = create_model("resnet20", classes=10)
    torch.nn.init.normal_(model.heads.weight, 1.0, 0.5)
    config = TrainConfig(target_macs=target, **train)
    return MacsBudget(model, 16, config, steps=1000), model


def test_gates_of_several_channels_keep_to_a_budget_and_to_the_sparse_engine(tmp_path) -> None:
    config = tiny_config(*SMALL, "train.target_macs=0.5", "heads.group=3")
    result = fit(config, tmp_path, quiet=True)
    model = load_checkpoint(result.checkpoint).model
    images, _ = next(iter(result.data.evaluation))
    gates, _ = model.route(images)
    assert all(torch.equal(g[:, 0], g[:, 1]) and torch.equal(g[:, 0], g[:, 2]) for g in gates)
    assert result.evaluation.macs_share == pytest.approx(0.5, rel=0.02)
    with torch.inference_mode():
        expected = model(images).logits
        error = (sparsify(model)(images).logits - expected).abs().max() / expected.abs().max()
        assert error <= 1e-4


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
    at_once, _ = make_budget(0.4, budget_ramp=(0.0, 0.0))
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
    for of_layer in model.heads.weight.split(model.heads.rows):
        initialise(of_layer, "split(0.8)")  # too much for the target
    e = torch.randn(64, 10).softmax(dim=1)
    for _ in range(400):
        budget.step(model.heads(e), progress=1.0)
    assert float((e @ model.heads.weight.T).min()) > -20


def test_layers_at_their_floor_are_only_opened() -> None:
    budget, model = make_budget(0.5, channel_floor=0.2)
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


def test_closed_gates_keep_a_gradient_under_a_budget() -> None:
    from deepmoe.registry import model_from_config

    model = model_from_config(tiny_config("train.target_macs=0.5"), 10)
    with torch.no_grad():
        model.heads.weight.fill_(-1.0)
    output = model(torch.randn(4, 3, 8, 8))
    assert all((g == 0).all() for g in output.gates)
    output.logits.square().sum().backward()
    assert model.heads.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("group", [1, 3])
def test_calibration_closes_the_weakest_gates_and_leaves_all_others(group: int) -> None:
    model = create_model("resnet20", classes=10, heads=HeadsConfig(group=group)).eval()
    torch.nn.init.normal_(model.heads.weight, 1.0, 0.1)  # near one: no threshold parts them
    budget = MacsBudget(model, 16, TrainConfig(target_macs=0.6, channel_floor=0.3), steps=10)
    batches = [(torch.randn(64, 3, 16, 16), torch.zeros(64))]
    with torch.no_grad():
        before = torch.cat(model.route(batches[0][0])[0], dim=1)
        budget.calibrate(model, batches)
        gates = model.route(batches[0][0])[0]
        after = torch.cat(gates, dim=1)
    share = float(count_macs(model, 16, gates).double().mean() / budget.dense)
    assert 0.6 - 0.008 * group < share <= 0.6  # within what one gate costs
    closed = (after == 0).all(dim=0)
    assert torch.equal(after[:, ~closed], before[:, ~closed])
    means = before.mean(dim=0).split(model.heads.widths)
    for of_layer, off in zip(means, closed.split(model.heads.widths), strict=True):
        assert 0.3 <= float((~off).float().mean()) < 1
        if group == 1:
            assert float(of_layer[off].max()) <= float(of_layer[~off].min())
    alive = model.heads.per_channel(model.heads.weight.amax(dim=1) > 0, dim=0)
    assert torch.equal(alive, ~closed)  # and can be removed for good


@pytest.mark.parametrize(("group", "floor", "target"), [(16, 0.05, 0.3), (3, 0.3, 0.45)])
@torch.no_grad()
def test_coarse_gates_meet_a_target_too_and_layers_keep_their_floor(
    group: int, floor: float, target: float
) -> None:
    model = create_model("resnet20", classes=10, heads=HeadsConfig(group=group)).eval()
    torch.nn.init.normal_(model.heads.weight, 0.3, 1.0)  # they differ from image to image
    model.embedding.project.weight.mul_(30)
    train = TrainConfig(target_macs=target, channel_floor=floor)
    budget = MacsBudget(model, 16, train, steps=10)
    batches = [(torch.randn(256, 3, 16, 16), torch.zeros(256))]
    budget.calibrate(model, batches)
    gates = model.route(batches[0][0])[0]
    share = float(count_macs(model, 16, gates).double().mean() / budget.dense)
    assert share == pytest.approx(target, rel=0.05)
    for g in gates:
        assert float((g > 0).float().mean()) >= floor - 1 / 256  # to an image
