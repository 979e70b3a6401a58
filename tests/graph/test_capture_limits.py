"""What a capture does not understand stays ungated, and is told."""

import pytest
import torch
import torch.nn.functional as F
from captured_networks import Network, Squeezed, gated
from torch import Tensor, nn

import deepmoe


class FixedSize(Network):
    """Its code makes numbers of the image's size."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 3), nn.Conv2d(12, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        rest = int(x.shape[-1]) % 4
        return self.last(F.relu(self.one(F.pad(x, (0, 4 - rest) if rest else (1, 1)))))


@torch.no_grad()
def test_a_size_that_the_code_holds_on_to_is_told() -> None:
    network = FixedSize().eval()
    model = deepmoe.gate(network, torch.randn(2, 3, 20, 21)).eval()
    x = torch.randn(2, 3, 20, 21)
    assert torch.equal(model(x).logits, network(x))
    other = torch.randn(2, 3, 20, 24)
    if model.gating.graph.size is None:  # its code could be followed after all
        assert torch.equal(model(other).logits, network(other))
    else:
        with pytest.raises(deepmoe.errors.UserError, match="captured for images of 20x21 px"):
            model(other)


class Named(Network):
    """Parts and methods are called like what the sparse engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1)
        self.parameter = nn.BatchNorm2d(12)

    def middle(self, x: Tensor) -> Tensor:
        x = self.linear(F.relu(self.parameter(self.gate(x))))
        return x / x.norm(dim=1, keepdim=True)


def test_names_are_the_networks_own() -> None:
    with pytest.warns(UserWarning, match="what linear makes stays ungated: it reaches norm"):
        model = gated(Named)
    found = deepmoe.check(model, torch.randn(2, 3, 20, 20))
    assert found.passed, str(found)


class Odd(Network):
    """What comes after the first layer is done by a function that nobody has heard of."""

    def __init__(self, function) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 10, 1)
        self.last = nn.Conv2d(10, 16, 1)
        self.function = function

    def middle(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.two(self.function(self.one(x)))))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.cumsum(dim=1), "reaches cumsum"),
        (lambda x: x.softmax(dim=1), "reaches softmax"),
        (lambda x: x.sort(dim=1).values, "reaches sort"),
        (lambda x: x.erf(), "reaches erf"),
        (lambda x: x[:, torch.arange(12).flip(0)], "reaches an index"),
    ],
    ids=["cumsum", "softmax", "sort", "erf", "index"],
)
def test_what_is_not_understood_stays_ungated_and_is_told(function, why: str) -> None:
    network, x = Odd(function), torch.randn(2, 3, 20, 20)
    with pytest.warns(UserWarning, match=f"what one makes stays ungated: it {why}"):
        model = deepmoe.gate(network, x)
    assert model.gating.names == ("stem", "two")
    assert deepmoe.check(model, x).passed


def test_a_network_that_is_understood_warns_of_nothing(recwarn) -> None:
    gated(Squeezed)
    assert not recwarn.list


class Counted(Network):
    """Its code holds on to numbers of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = (nn.Conv2d(*w, 1) for w in ((8, 12), (12, 10), (10, 16)))

    def middle(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        x = self.one(x).view(b, 3, 4, h, w).transpose(1, 2).reshape(b, 12, h, w)
        return self.last(F.relu(self.two(x)))


def test_channels_that_the_code_counts_stay() -> None:
    model = gated(Counted)
    assert model.gating.names == ("stem", "two")
    group = next(g for g in model.gating.graph.groups if g.name == "one")
    assert group.pinned == "has a number of channels that the network's code relies on"
    assert deepmoe.check(model, torch.randn(2, 3, 20, 20)).passed
