"""Networks that others have written: gates are put in by one line, and every promise is tried."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import randomise_statistics, slow
from third_party import CLASSES, NETWORKS
from torch import Tensor, nn

import deepmoe
from deepmoe.building import add_gates
from deepmoe.checking import TOLERANCE
from deepmoe.description import gated_share
from deepmoe.graph import choose
from deepmoe.model import DeepMoE
from deepmoe.random_routes import set_routes

SIZE, OTHER_SIZE = (49, 41), (50, 67)
SIZES = {"timm-dla34": ((32, 64), (64, 32))}  # it takes multiples of 32 alone
WIDTHS = (8, 8, 16)  # of the embedding, small and quick
LEAST_SHARE = 0.7  # of the MACs that is to lie under gates


class ThreeConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 16, 3, padding=1)
        self.two = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.three = nn.Conv2d(24, 32, 3, padding=1)
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.two(F.relu(self.one(x))))
        return self.classifier(F.relu(self.three(x)).mean(dim=(2, 3)))


# One of each kind of block and package.
QUICK = ("hf-resnet", "timm-efficientnet_b0", "timm-convnext_tiny", "timm-dla34")
QUICK += ("torchvision-densenet", "torchvision-vgg16_bn")


@pytest.fixture(
    scope="module",
    params=["three-convolutions", *(name if name in QUICK else slow(name) for name in NETWORKS)],
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def sizes(name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of images: the one that the network is captured with, and another."""
    return SIZES.get(name, (SIZE, OTHER_SIZE))


@pytest.fixture
def model(name: str, sizes) -> DeepMoE:
    return gated(name, sizes[0])


@functools.lru_cache(maxsize=2)
def gated(name: str, size: tuple[int, int]) -> DeepMoE:
    """Captured once for all tests of a network: that takes seconds."""
    torch.manual_seed(0)
    make = NETWORKS.get(name, ThreeConvolutions)
    network = randomise_statistics(make().eval())  # else some start with blocks that give nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".* stays ungated.*: it reaches layernorm")
        return deepmoe.gate(network, torch.randn(2, 3, *size))


def under_all_gates(model: DeepMoE) -> DeepMoE:
    """As `gate(..., where="all")` makes it, without capturing the network again."""
    gating = choose(model.gating.graph, "all")
    return add_gates(model.network, gating, None, None, WIDTHS).eval()


def test_every_rule_is_kept(model: DeepMoE, sizes) -> None:
    found = deepmoe.check(model, torch.randn(2, 3, *sizes[0]))
    assert found.passed, str(found)


def test_most_of_the_work_lies_under_gates(model: DeepMoE, sizes) -> None:
    gating = choose(model.gating.graph, "all")
    assert gated_share(gating, sizes[0]) >= LEAST_SHARE
    assert set(model.gating.names) <= set(gating.names)


@pytest.mark.parametrize("density", [0.1, 0.5])
@torch.no_grad()
def test_the_sparse_engine_equals_the_model(model: DeepMoE, sizes, density: float) -> None:
    routed = under_all_gates(model)
    set_routes(routed, sizes[0], density)
    sparse = deepmoe.sparsify(routed)
    # Some networks' code holds on to the size of images that they were captured with.
    size = sizes[0] if density == 0.1 or model.gating.graph.size is not None else sizes[1]
    x = torch.randn(3, 3, *size) * torch.tensor([0.5, 1.0, 2.0]).view(-1, 1, 1, 1)
    expected = routed(x)
    gates_BC = torch.cat(expected.gates, dim=1) != 0
    assert gates_BC.float().mean().item() == pytest.approx(density, abs=0.05)
    assert len(gates_BC.unique(dim=0)) > 1  # images take different routes
    largest = expected.logits.abs().max()
    for images in (x, x[:1]):
        difference = sparse(images).logits - expected.logits[: len(images)]
        assert difference.abs().max() <= TOLERANCE * largest


def test_a_training_step_lowers_the_loss_by_as_much_as_its_gradient_says(model, sizes) -> None:
    model = copy.deepcopy(model).train()
    x, labels = torch.randn(4, 3, *sizes[0]), torch.tensor([0, 1, 2, 3])

    def loss() -> Tensor:
        torch.manual_seed(0)  # dropout drops the same each time
        return F.cross_entropy(model(x).logits, labels)

    before = loss()
    before.backward()
    assert model.heads.weight.grad.abs().max() > 0
    squares = sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None)
    expected = 0.002 * before.item()
    torch.optim.SGD(model.parameters(), lr=expected / squares).step()
    assert before.item() - loss().item() == pytest.approx(expected, rel=0.2)
