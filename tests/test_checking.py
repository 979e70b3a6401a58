"""`check` finds what is wrong, and names it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepmoe
import deepmoe.sparse
from deepmoe.checking import DENSITIES, Check
from deepmoe.errors import UserError
from deepmoe.graph import Gating
from deepmoe.model import DeepMoE

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3)
        self.three, self.classifier = nn.Conv2d(32, 32, 3), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.three(F.relu(self.two(F.relu(self.one(x))))))
        return self.classifier(x.mean(dim=(2, 3)))


@pytest.fixture
def model() -> DeepMoE:
    return deepmoe.gate(Three(), IMAGES)


def broken_rules(found: Check) -> dict[str, str]:
    return {rule.name: rule.found for rule in found.rules if not rule.passed}


def test_a_good_model_passes_and_stays_as_it_was(model) -> None:
    model.network.two.eval()
    model.exit_at = torch.tensor(0.0)  # what the embedding answers is no matter of the gates
    modes = [m.training for m in model.modules()]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    found = deepmoe.check(model, IMAGES)
    assert found.passed
    assert str(found).count("ok  ") == len(found.rules) == 6
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert found == deepmoe.check(model, IMAGES)


def test_a_layer_that_gives_something_else_each_time_is_named(model) -> None:
    calls = []
    model.network.two.register_forward_hook(lambda m, x, y: calls.append(0) or y + len(calls))
    broken = broken_rules(deepmoe.check(model, IMAGES))
    first = broken["gates of one equal the network"]
    assert first == "two is the first layer that differs"


def test_a_layer_that_looks_at_its_number_of_channels_is_named(model) -> None:
    model.network.one.register_forward_hook(lambda m, x, y: y + y.shape[1])
    broken = broken_rules(deepmoe.check(model, IMAGES))
    for density in DENSITIES:
        found = broken[f"closed gates equal removed channels, density {density:g}"]
        assert found.endswith("one is the first layer that differs")
    assert "gates of one equal the network" not in broken


def test_work_that_nobody_counts_is_found(model) -> None:
    model.network.two.register_forward_hook(lambda m, x, y: y + 0 * (y @ y.transpose(2, 3)).mean())
    broken = broken_rules(deepmoe.check(model, IMAGES))
    assert set(broken) == {f"MACs equal PyTorch's count, density {d:g}" for d in DENSITIES}
    assert all(found.endswith("something else multiplies matrices") for found in broken.values())


def test_a_layer_that_is_counted_wrongly_is_named(model) -> None:
    graph = model.gating.graph
    twice = replace(graph.layers[1], weights_per_output=2 * graph.layers[1].weights_per_output)
    layers = (graph.layers[0], twice, *graph.layers[2:])
    model.gating = Gating(
        replace(graph, layers=layers, _positions={}, _other_macs={}), model.gating.gated
    )
    broken = broken_rules(deepmoe.check(model, IMAGES))
    assert set(broken) == {f"MACs equal PyTorch's count, density {d:g}" for d in DENSITIES}
    assert all(found.startswith("two has ") for found in broken.values())


def test_a_sparse_engine_that_is_wrong_is_found(model, monkeypatch) -> None:
    sparsify = deepmoe.sparse.sparsify

    def wrong(tried: DeepMoE) -> DeepMoE:
        made = sparsify(tried)
        made.register_forward_hook(lambda m, x, y: y._replace(logits=y.logits * 1.001))
        return made

    monkeypatch.setattr(deepmoe.sparse, "sparsify", wrong)
    assert list(broken_rules(deepmoe.check(model, IMAGES))) == [
        "the sparse engine equals the model"
    ]


@pytest.mark.parametrize("classes", [5, 1000])
def test_the_sparse_engine_is_tried_at_the_densities_that_are_told(classes, monkeypatch) -> None:
    network = Three()
    network.classifier = nn.Linear(32, classes)
    sparsify, densities, routes = deepmoe.sparse.sparsify, [], []

    def spied(tried: DeepMoE) -> DeepMoE:
        gates_BC = torch.cat(tried(IMAGES).gates, dim=1) != 0
        densities.append(gates_BC.float().mean().item())
        routes.append(len(gates_BC.unique(dim=0)))
        return sparsify(tried)

    monkeypatch.setattr(deepmoe.sparse, "sparsify", spied)
    assert deepmoe.check(deepmoe.gate(network, IMAGES), IMAGES).passed
    assert min(densities) == pytest.approx(0.1, abs=0.05)
    assert max(densities) == pytest.approx(0.5, abs=0.1)
    assert all(0.05 <= density <= 0.6 for density in densities)
    assert max(routes) > 1  # images of a batch take different ones


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: deepmoe.create_model("resnet20", gates=None), "gated"),
        (lambda: deepmoe.create_model("resnet20", gates=None, exits=True), "gated"),
        (Three, "gate"),
        (lambda: deepmoe.sparsify(deepmoe.gate(Three(), IMAGES)), "sparse"),
    ],
    ids=["dense", "exits alone", "not gated", "sparse"],
)
def test_what_can_not_be_checked_is_refused(make, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        deepmoe.check(make(), IMAGES)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("shape", [(0, 3, 16, 16), (2, 1, 16, 16), (3, 16, 16), (2, 3, 4, 4)])
def test_images_that_do_not_fit_are_refused(model, shape) -> None:
    with pytest.raises(UserError) as raised:
        deepmoe.check(model, torch.randn(shape))
    assert "\n" not in str(raised.value)
