"""Which runs lead to a method's network, and what they cost."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from deepmoe.compare import METHODS, Cell, Method, method_named
from deepmoe.compare.li import SETTINGS, published_widths
from deepmoe.compare.reach import check_reach
from deepmoe.config import RunConfig, load_config
from deepmoe.configured_models import model_from_config
from deepmoe.costs import cost_matrix, count_costs, dense_macs, macs_of_counts
from deepmoe.errors import UserError
from deepmoe.graph import prunable
from deepmoe.layers.heads import kept_of
from deepmoe.registry import create_model
from deepmoe.training.schedules import stages

BASE = load_config(
    "vgg16_cifar100_short",
    [
        "model.gates=none",
        "train.start=start.safetensors",
        "loss.sparsity=0",
        "train.epochs=10",
        "train.finetune_epochs=0",
    ],
)


START_EPOCHS = 12


def cell(method: Method, share: float = 0.5, base: RunConfig = BASE) -> Cell:
    return Cell(base, share, 100, (32, 32), f"{method.name}-50", method.name, START_EPOCHS)


def test_no_two_methods_have_one_name() -> None:
    assert len({m.name for m in METHODS}) == len(METHODS)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_plan_ends_with_the_methods_network(method: Method) -> None:
    *before, last = method.plan(cell(method))
    assert last.name == f"{method.name}-50"
    named = {f"run:{step.name}" for step in before}
    assert all(step.config.data == BASE.data for step in (*before, last))
    starts = {step.config.train.start for step in (*before, last)}
    assert starts <= {"start.safetensors", None, *named}
    if before:
        assert last.config.train.start in named
    if method.select is not None:
        assert last.config.train.prune_by == method.name and last.config.train.prune == 0.5


@pytest.mark.parametrize(
    ("name", "size", "macs"),
    [
        ("vgg16-a", 32, 2.06e8),
        ("resnet56-a", 32, 1.12e8),
        ("resnet56-b", 32, 9.09e7),
        ("resnet110-a", 32, 2.13e8),
        ("resnet110-b", 32, 1.55e8),
        ("resnet34-b", 224, 2.76e9),
    ],
)
def test_settings_of_li_cost_what_the_paper_says(name: str, size: int, macs: float) -> None:
    setting = SETTINGS[name]
    with torch.device("meta"):
        model = create_model(setting.model, classes=10 if size == 32 else 1000, gates=None)
    gating = prunable(model.gating.graph)
    widths = published_widths(name, setting.model, gating)
    counts = torch.tensor([widths], dtype=torch.float64)
    found = macs_of_counts(counts, cost_matrix(gating, size)).item()
    assert found == pytest.approx(macs, rel=0.01)


def test_settings_are_of_one_network() -> None:
    with torch.device("meta"):
        gating = prunable(create_model("resnet56", gates=None).gating.graph)
    with pytest.raises(UserError, match="vgg16-a is a setting of vgg16, not of resnet56"):
        published_widths("vgg16-a", "resnet56", gating)
    with pytest.raises(UserError, match="no setting of Li is named 'x'; there are vgg16-a"):
        published_widths("x", "resnet56", gating)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_thin_networks_cost_the_share_and_train_for_up_to_twice_the_epochs(share: float) -> None:
    thin, long = (method_named(name) for name in ("thin", "thin-long"))
    (step,), (longer,) = thin.plan(cell(thin, share)), long.plan(cell(long, share))
    model = model_from_config(step.config, 100)
    left = count_costs(model, 32).macs / dense_macs(model, 32)
    assert 0.97 * share < left <= share
    assert step.config.train.start is None and step.config.train.epochs == START_EPOCHS
    assert longer.config.train.epochs == round(START_EPOCHS / max(left, 0.5))
    assert longer.config.model.kept == step.config.model.kept


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_noisy_top_k_keeps_as_many_channels_as_the_cost_allows(share: float) -> None:
    method = method_named("noisy-topk")
    (step,) = method.plan(cell(method, share))
    model = model_from_config(step.config, 100)
    costs = count_costs(model, 32)

    def of(kept_share: float) -> float:
        kept = torch.tensor([kept_of(kept_share, model.gating.widths)], dtype=torch.float64)
        network = macs_of_counts(kept, cost_matrix(model.gating, 32)).item()
        return (network + costs.embedding_macs + costs.gate_macs) / dense_macs(model, 32)

    assert of(step.config.heads.share) <= share < of(step.config.heads.share + 0.01)


@pytest.mark.parametrize("name", ["li", "he", "sss", "hard-moe", "fbs", "rnp", "gates", "thin"])
def test_a_cost_out_of_reach_is_told_before_anything_is_trained(name: str) -> None:
    method = method_named(name)
    asked = cell(method, 0.0005)
    with pytest.raises(UserError, match=r"0\.000\d+ of the (dense )?MACs") as told:
        for step in method.plan(asked):
            check_reach(asked, step)
    assert "\n" not in str(told.value)


class WithoutNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.one(x).relu().mean(dim=(2, 3)))


@pytest.mark.parametrize("name", ["sss", "slimming"])
def test_networks_without_batch_norm_are_told_before_anything_is_trained(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepmoe.sources.make_network", lambda *_, **__: WithoutNorm())
    monkeypatch.setattr("deepmoe.registry.make_network", lambda *_, **__: WithoutNorm())
    model = dataclasses.replace(BASE.model, name="somewhere:make")
    base = dataclasses.replace(BASE, model=model)
    with pytest.raises(UserError, match="need batch norm behind every convolution, and one has"):
        method_named(name).plan(cell(method_named(name), 0.5, base))


def test_the_network_under_an_agent_learns_as_long_as_others() -> None:
    method = method_named("rnp")
    (step,) = method.plan(cell(method))
    turns = stages(step.config.train, by_turns=True)
    own = sum(turn.end - turn.start for turn in turns if turn.frozen)  # while the agent is
    assert own == BASE.train.epochs


def test_slimming_penalises_residual_networks_less() -> None:
    method = method_named("slimming")
    first, _ = method.plan(cell(method))
    residual = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, name="resnet20"))
    other, _ = method.plan(cell(method, 0.5, residual))
    assert first.config.loss.norm_sparsity == 10 * other.config.loss.norm_sparsity > 0


def test_unknown_methods_get_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"no method is named 'taylr'.*taylor"):
        method_named("taylr")
