"""Wide models from trained ones: more channels, the same function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import randomise_statistics
from torch import Tensor, nn

import deepmoe
from deepmoe.costs import count_macs
from deepmoe.errors import UserError
from deepmoe.graph import prunable
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE, confidence


class Block(nn.Module):
    """Expands, looks around depthwise, squeezes and excites, projects, and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.expand = nn.Conv2d(8, 16, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Conv2d(16, 8, 1)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (8, 16, 16, 8)))
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        y = F.silu(self.norms[1](self.expand(x)))
        y = F.silu(self.norms[2](self.depthwise(y)))
        y = y * self.excite(F.relu(self.squeeze(y.mean(dim=(2, 3), keepdim=True)))).sigmoid()
        x = x + self.norms[3](self.project(y))
        return self.classifier(x.mean(dim=(2, 3)))


class Branches(nn.Module):
    """Grouped convolutions, and what several layers make side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3)
        self.left, self.right = nn.Conv2d(12, 6, 1), nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.norm, self.last = nn.BatchNorm2d(18), nn.Conv2d(18, 10, 1)
        self.classifier = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.norm(torch.cat([self.left(x), self.right(x)], dim=1)))
        return self.classifier(F.gelu(self.last(x)).mean(dim=(2, 3)))


def model(kind: str, where: str | list[str] = "all") -> DeepMoE:
    if kind.startswith(("vgg", "resnet")):
        made = deepmoe.create_model(kind, classes=5, gates=where)
    else:
        network = {"block": Block, "branches": Branches}[kind]()
        made = deepmoe.gate(network, torch.randn(2, 3, 32, 32), where=where)
    randomise_statistics(made.network)
    nn.init.uniform_(made.heads.weight, -0.5, 1.0)
    return made.eval()


# The stem of a block is its residual stream, which the classifier reads, too.
STREAM = ["stem", "expand", "squeeze"]
CASES = [("vgg11", "inner"), ("resnet20", "inner"), ("block", STREAM), ("branches", "all")]


def assert_same_function(one: DeepMoE, other: DeepMoE) -> None:
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected, found = one(x).logits, other(x).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("kind", "where"), CASES, ids=[kind for kind, _ in CASES])
@pytest.mark.parametrize("factor", [1, 1.3, 2, 3.5])
def test_the_function_is_unchanged(kind: str, where: str | list[str], factor: float) -> None:
    narrow = model(kind, where)
    wide = deepmoe.widen(narrow, factor)
    assert_same_function(narrow, wide)
    assert wide.gating.widths == tuple(round(factor * w) for w in narrow.gating.widths)
    assert type(wide.network) is type(narrow.network)
    # Its own forward, without gates, works too.
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(wide.network(x), narrow.network(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "where"), CASES, ids=[kind for kind, _ in CASES])
def test_every_rule_is_kept(kind: str, where: str | list[str]) -> None:
    found = deepmoe.check(deepmoe.widen(model(kind, where), 2), torch.randn(2, 3, 32, 32))
    assert found.passed, str(found)


def test_what_lies_between_gated_layers_costs_four_times_as_much() -> None:
    narrow = model("resnet20", "inner")
    wide = deepmoe.widen(narrow, 2)
    twin = deepmoe.create_model("resnet20", classes=5, wide=2)
    assert wide.gating.widths == twin.gating.widths
    assert count_macs(wide.gating, 32) == count_macs(twin.gating, 32)
    assert wide.source.wide == 2  # a checkpoint of it says how it is made


@pytest.mark.parametrize("where", ["inner", ["expand"], ["stem"]])
def test_only_what_has_gates_gets_wider(where) -> None:
    narrow = model("block", where)
    wide = deepmoe.widen(narrow, 2)
    assert wide.gating.names == narrow.gating.names
    assert (wide.network.stem.out_channels == 16) == (where == ["stem"])
    assert (wide.network.expand.out_channels == 32) == (where != ["stem"])
    assert_same_function(narrow, wide)


def test_the_model_itself_stays_as_it_was() -> None:
    narrow = model("block")
    before = copy.deepcopy(narrow.state_dict())
    wide = deepmoe.widen(narrow, 2)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.zero_()
    for name, tensor in narrow.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.requires_grad for p in wide.parameters())


def gap_after_training(noise: float) -> float:
    """How far copies of channels are apart after some steps."""
    torch.manual_seed(0)
    wide = deepmoe.widen(
        deepmoe.gate(Block(), torch.randn(2, 3, 32, 32), where="all"), 2, noise=noise
    )
    optimizer = torch.optim.SGD(wide.train().parameters(), lr=0.1)
    x, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 5
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(wide(x).logits, labels).backward()
        optimizer.step()
    kernels = wide.network.expand.weight.detach()
    assert len(kernels) == 32
    return (kernels[0::2] - kernels[1::2]).abs().max().item()


def test_noise_lets_copies_learn_different_things() -> None:
    assert gap_after_training(0.0) < 1e-6
    assert gap_after_training(0.05) > 1e-4


def test_the_same_seed_gives_the_same_model() -> None:
    narrow = model("block")
    weights = [deepmoe.widen(narrow, 2, seed=s).network.project.weight for s in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_dense_twin_is_widened_where_gates_could_be() -> None:
    dense = deepmoe.create_model("resnet20", classes=5, gates=None).eval()
    wide = deepmoe.widen(dense, 2)
    assert not wide.gated
    assert_same_function(dense, wide)
    assert count_macs(wide, 32) > 1.9 * count_macs(dense, 32)


@pytest.mark.parametrize("gates", [None, "inner"])
def test_exits_stay_as_they_are(gates: str | None) -> None:
    narrow = deepmoe.create_model("resnet20", classes=5, gates=gates, exits=True).eval()
    x = torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        narrow.exit_at = confidence(narrow(x).embedding_logits).median()
        wide = deepmoe.widen(narrow, 2)
        expected, found = narrow(x), wide(x)
    assert 0 < expected.exited.sum() < len(x)
    assert torch.equal(found.exited, expected.exited)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-4)
    wide.exit_at.zero_()
    assert narrow.exit_at > 0  # of its own, as all else


def test_a_wide_model_can_be_widened_again() -> None:
    narrow = model("branches")
    wide = deepmoe.widen(deepmoe.widen(narrow, 1.5), 2)
    assert_same_function(narrow, wide)
    assert wide.gating.widths == tuple(2 * round(1.5 * w) for w in narrow.gating.widths)


def coded() -> DeepMoE:
    made = model("block")
    codes = torch.rand(2, sum(made.gating.widths))
    return made.with_gates(
        codebook=RouteCodebook(codes, torch.ones(codes.shape[1]), made.heads.widths)
    )


def pruned() -> DeepMoE:
    whole = deepmoe.create_model("vgg11", gates=None)
    kept = prunable(whole.gating.graph).widths
    return deepmoe.create_model("vgg11", gates=None, kept=kept)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: model("block"), {"factor": 0.5}, "from 1 to 16"),
        (lambda: model("block"), {"factor": 17}, "from 1 to 16"),
        (lambda: model("block"), {"factor": float("nan")}, "from 1 to 16"),
        (lambda: model("block"), {"factor": 2, "noise": -0.1}, "noise from 0 to 1"),
        (Block, {"factor": 2}, "gate\\(network, images\\)"),
        (coded, {"factor": 2}, "codebook"),
        (lambda: deepmoe.sparsify(model("block")), {"factor": 2}, "sparse"),
        (pruned, {"factor": 2}, "then prune it"),
    ],
    ids=["smaller", "huge", "nan", "noise", "not gated", "codebook", "sparse", "pruned"],
)
def test_what_can_not_be_widened_is_refused(make, options, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        deepmoe.widen(make(), **options)
    assert "\n" not in str(raised.value)
