"""A captured network computes what its own forward does, in both modes, and its channels are known.

Each of the small networks here has one thing that networks of others do.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import randomise_statistics
from torch import Tensor, nn

import deepmoe
from deepmoe.graph import describe
from deepmoe.model import DeepMoE


class Network(nn.Module):
    """A stem of eight channels, something of sixteen, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(16, 5)

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.classifier(self.middle(x).mean(dim=(2, 3)))


class Residual(Network):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        return self.last(x + self.two(F.relu(self.one(x))))


class InPlace(Network):
    """An activation changes what a shortcut then reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.relu, self.last = nn.ReLU(inplace=True), nn.Conv2d(8, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        x = self.one(x)
        y = self.two(self.relu(x))
        y += x  # what ReLU has left there
        return F.hardswish(self.last(y), inplace=True)


class Functional(Network):
    """Layers are called by their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 10, 3), nn.Conv2d(10, 16, 1)
        self.other_norm = nn.BatchNorm2d(10)

    def middle(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.one.weight, self.one.bias, stride=2, padding=2)
        norm = self.other_norm
        given = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        x = F.relu(F.batch_norm(x, *given, self.training, 0.1, norm.eps))
        return F.conv2d(x, self.two.weight, self.two.bias)


class Concatenated(Network):
    """Each layer reads what all before it have made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(12, 6, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(12), nn.BatchNorm2d(18)])
        self.last = nn.Conv2d(18, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.one(x)], dim=1)
        x = torch.cat([x, self.two(F.relu(self.norms[0](x)))], dim=1)
        return self.last(F.relu(self.norms[1](x)))


class Split(Network):
    """Two halves go different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.left, self.right = (
            nn.Conv2d(8, 12, 1),
            nn.Conv2d(6, 5, 1),
            nn.Conv2d(6, 7, 1),
        )
        self.last = nn.Conv2d(12, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        left, right = self.one(x).chunk(2, dim=1)
        return self.last(torch.cat([self.right(right), self.left(left)], dim=1).relu())


class Gated(Network):
    """Half of the channels multiply the others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 1), nn.Conv2d(6, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        value, weight = self.one(x).chunk(2, dim=1)
        return self.last(value * weight.sigmoid())


class Shuffled(Network):
    """Channels of two branches alternate, and are split again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)
        self.three, self.last = nn.Conv2d(6, 6, 1), nn.Conv2d(12, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        x = torch.cat([self.one(x), self.two(x)], dim=1)
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        left, right = x.chunk(2, dim=1)
        return self.last(torch.cat([left, self.three(right).relu()], dim=1))


class Squeezed(Network):
    """Squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 16, 1)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)

    def middle(self, x: Tensor) -> Tensor:
        x = F.silu(self.one(x))
        scale = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return self.last(x * scale.sigmoid())


class Depthwise(Network):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.last = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1)
        self.depthwise = nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12)
        self.other_norm = nn.BatchNorm2d(12)

    def middle(self, x: Tensor) -> Tensor:
        x = F.relu6(self.expand(x))
        return self.last(F.gelu(self.other_norm(self.depthwise(x))))


class Grouped(Network):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=3)

    def middle(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.grouped(F.relu(self.one(x)))))


class Dropping(Network):
    """Both kinds of dropout, as modules and as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1)
        self.drop = nn.Dropout2d(0.4)

    def middle(self, x: Tensor) -> Tensor:
        x = F.dropout(self.drop(self.one(x)), 0.3, self.training)
        return F.dropout(self.last(x), training=self.training)


class Linears(Network):
    """Layers that read channels at the end of a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 16)
        self.scale = nn.Parameter(torch.rand(12))

    def middle(self, x: Tensor) -> Tensor:
        x = self.scale * F.gelu(self.one(x.permute(0, 2, 3, 1)))
        return self.two(x).permute(0, 3, 1, 2)


# What each group is gated by with `all`: the layers that make it.
UNDERSTOOD: dict[type[Network], list[tuple[str, ...]]] = {
    Residual: [("stem", "two"), ("one",)],
    InPlace: [("stem",), ("one", "two")],
    Functional: [("stem",), ("one",)],
    Concatenated: [("stem",), ("one",), ("two",)],
    Gated: [("stem",), ("one",)],
    Squeezed: [("stem",), ("one", "excite")],  # what it squeezes costs next to nothing
    Depthwise: [("stem",), ("expand",)],
    Grouped: [("stem",), ("one",)],
    Dropping: [("stem",), ("one",)],
    Linears: [("stem",), ("one",)],
}
KINDS = [*UNDERSTOOD, Split, Shuffled]


def gated(kind: type[Network], where: str = "all", size: tuple[int, int] = (20, 20)) -> DeepMoE:
    network = randomise_statistics(kind())
    return deepmoe.gate(network, torch.randn(2, 3, *size), where=where)


@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_channels_that_belong_together_have_one_gate(kind: type[Network]) -> None:
    gating = gated(kind).gating
    makers = [gating.graph.groups[number].makers for number in gating.gated]
    assert sorted(makers) == sorted(UNDERSTOOD[kind])


def test_only_what_stays_inside_of_a_residual_block_is_inner() -> None:
    assert gated(Residual, "inner").gating.names == ("one",)


def test_a_block_of_a_grouped_convolution_has_one_gate() -> None:
    gating = gated(Grouped).gating
    assert (gating.names, gating.widths) == (("stem", "one"), (8, 3))


@pytest.mark.parametrize("kind", [Split, Shuffled])
@torch.no_grad()
def test_halves_that_lose_different_numbers_of_channels(kind: type[Network]) -> None:
    """Whatever is gated can be removed, also where the network's code takes halves for alike."""
    model = gated(kind).eval()
    gating, x = model.gating, torch.randn(2, 3, 20, 20)
    for number, width in enumerate(gating.widths):
        masks = [torch.ones(w, dtype=torch.bool) for w in gating.widths]
        masks[number][: width // 2] = False
        small, small_gating, _ = gating.narrow(model.network, masks)
        expected = gating(model.network, x, [m.float().expand(2, -1) for m in masks])
        ones = [torch.ones(2, w) for w in small_gating.widths]
        torch.testing.assert_close(small_gating(small, x, ones), expected)
        torch.testing.assert_close(small(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_is_kept(kind: type[Network]) -> None:
    found = deepmoe.check(gated(kind), torch.randn(3, 3, 20, 20))
    assert found.passed, str(found)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_training_mode_is_that_of_the_network(kind: type[Network]) -> None:
    model = gated(kind).train()
    original = copy.deepcopy(model.network)
    for size in ((20, 20), (33, 18)):
        x = torch.randn(4, 3, *size)
        torch.manual_seed(1)
        expected = original(x)
        torch.manual_seed(1)
        found = model.gating(model.network, x, [torch.ones(4, w) for w in model.gating.widths])
        assert torch.equal(found, expected)
    # Batch norms have seen the same.
    assert model.network.norm.num_batches_tracked == 2
    for name, tensor in original.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(model.network.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_network(kind: type[Network]) -> None:
    model = gated(kind).train()
    original = copy.deepcopy(model.network)
    x, weights = torch.randn(4, 3, 20, 20), torch.randn(4, 5)
    for logits in (lambda: original(x), lambda: model(x).logits):
        torch.manual_seed(1)
        (logits() * weights).sum().backward()
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(model.network.get_parameter(name).grad, parameter.grad)


def test_a_network_keeps_its_names_weights_and_modes() -> None:
    network = Dropping()
    network.norm.eval()  # as who fine-tunes does
    state = copy.deepcopy(network.state_dict())
    modes = {name: m.training for name, m in network.named_modules()}
    model = deepmoe.gate(network, torch.randn(2, 3, 20, 20))
    assert model.network is network
    assert network.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[n]) for n, t in network.state_dict().items())
    assert {name: m.training for name, m in network.named_modules()} == modes


class DropPath(nn.Module):
    """As in timm and torchvision: whole images lose what a block adds, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(len(x), 1, 1, 1) > 0.5) * 2


class Stochastic(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.drop_path = DropPath()

    def middle(self, x: Tensor) -> Tensor:
        return self.last(x + self.drop_path(self.two(F.relu(self.one(x)))))


@torch.no_grad()
def test_what_a_network_does_in_training_alone() -> None:
    model = gated(Stochastic).train()
    x = torch.randn(8, 3, 20, 20)
    outputs = []
    for network in (copy.deepcopy(model.network), lambda x: model(x).logits):
        torch.manual_seed(1)
        outputs.append(network(x))
    torch.testing.assert_close(*outputs)


def test_a_frozen_norm_stays_frozen_in_training() -> None:
    model = gated(Residual).train()
    model.network.norm.eval()
    before = model.network.norm.running_mean.clone()
    model(torch.randn(4, 3, 20, 20))
    assert torch.equal(model.network.norm.running_mean, before)


@torch.no_grad()
def test_capturing_with_one_image_leaves_the_batch_free() -> None:
    network = Residual().eval()
    model = deepmoe.gate(network, torch.randn(1, 3, 20, 20)).eval()
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 24, 19)
        torch.testing.assert_close(model(x).logits, network(x))


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


@torch.no_grad()
def test_a_gated_network_survives_pickle_and_copies() -> None:
    model = gated(Squeezed).eval()
    nn.init.uniform_(model.heads.weight, -1, 1)
    x = torch.randn(2, 3, 20, 20)
    expected = model(x).logits
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(x).logits, expected)
        other.network.stem.weight.zero_()
        assert torch.equal(model(x).logits, expected)  # weights are its own
        assert not torch.equal(other(x).logits, expected)


@pytest.mark.parametrize("training", [False, True])
def test_compiles_to_one_graph(training: bool) -> None:
    torch.compiler.reset()
    model = gated(Squeezed).train(training)
    nn.init.uniform_(model.heads.weight, -0.5, 1)
    other = copy.deepcopy(model)
    x = torch.randn(4, 3, 20, 20)
    found = torch.compile(other, fullgraph=True, backend="aot_eager")(x).logits
    expected = model(x).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    if training:
        expected.sum().backward()
        found.sum().backward()
        for name, parameter in model.named_parameters():
            gradient = other.get_parameter(name).grad
            torch.testing.assert_close(gradient, parameter.grad, atol=1e-4, rtol=1e-3)


def test_capturing_twice_gives_the_same() -> None:
    network, x = Concatenated(), torch.randn(2, 3, 20, 20)
    first, second = describe(network, x), describe(network, x)
    assert first.groups == second.groups
    assert [layer.path for layer in first.layers] == [layer.path for layer in second.layers]


@torch.no_grad()
def test_gates_made_by_an_export_are_those_made_by_tracing() -> None:
    """The same network, one that `torch.fx` can follow and one that it can't."""

    class Asks(Squeezed):
        def middle(self, x: Tensor) -> Tensor:
            if x.shape[1] != 8:  # a stand-in has no answer
                raise ValueError("eight channels are read")
            return super().middle(x)

    traced, exported = gated(Squeezed), gated(Asks)
    assert traced.gating.graph.groups == exported.gating.graph.groups
    exported.network.load_state_dict(traced.network.state_dict())
    x, ones = torch.randn(2, 3, 31, 17), [torch.ones(2, w) for w in traced.gating.widths]
    traced.eval()
    exported.eval()
    assert torch.equal(
        exported.gating(exported.network, x, ones), traced.gating(traced.network, x, ones)
    )


def test_other_sizes_of_images_while_double_is_the_default() -> None:
    """As in training with train.precision = "64-true"."""
    model = deepmoe.create_model("resnet20", classes=10)
    expected = dict(deepmoe.create_model("resnet20", classes=10).gating.graph.positions((40, 24)))
    torch.set_default_dtype(torch.float64)
    try:
        assert model.gating.graph.positions((40, 24)) == expected
    finally:
        torch.set_default_dtype(torch.float32)
