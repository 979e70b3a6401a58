"""Networks of the zoo: gates against physically smaller networks, and costs against PyTorch's."""

import copy
from collections.abc import Sequence

import pytest
import torch
from helpers import counted_macs, narrowed_for, random_gates, randomise_statistics
from torch import Tensor, nn

from deepmoe.costs import count_macs
from deepmoe.errors import UserError
from deepmoe.graph import Gating
from deepmoe.ops import mixture_of_experts_conv2d
from deepmoe.registry import create_model

# name, options, input: one of each shape that the zoo knows, at small size
CASES = [
    ("vgg11", {}, (32, 32)),
    ("vgg16", {"widths": [8, 8, 16, 16, 20, 20, 20, 24, 24, 24, 24, 24, 24]}, (32, 48)),
    ("vgg16", {"widths": [8] * 13, "gate_last": True}, (33, 32)),
    ("resnet20", {}, (32, 32)),
    ("resnet20", {"gates": "all", "wide": 2}, (17, 20)),
    ("resnet56", {"wide": 2}, (16, 16)),
    ("resnet18_cifar", {"wide": 2}, (16, 16)),
    ("resnet18_cifar", {"gates": "all"}, (16, 17)),
    ("resnet18", {"classes": 10}, (64, 64)),
    ("resnet18", {"classes": 10, "gates": "all"}, (65, 50)),
    ("resnet50", {"classes": 10}, (64, 64)),
    ("resnet50", {"classes": 10, "block": "bottleneck-b", "wide": 2, "gates": "all"}, (64, 64)),
    ("drn_a_50", {}, (41, 64)),
    ("drn_a_50", {"block": "bottleneck-b", "gates": "all"}, (40, 40)),
]
IDS = [f"{name}-{'-'.join(map(str, options))}-{size[0]}x{size[1]}" for name, options, size in CASES]


def make(name: str, options: dict) -> tuple[nn.Module, Gating]:
    model = create_model(name, **options)
    return randomise_statistics(model.network).eval(), model.gating


@pytest.mark.parametrize(("name", "options", "size"), CASES, ids=IDS)
@torch.no_grad()
def test_closed_gates_equal_physically_removed_channels(name, options, size) -> None:
    # In double precision, so that nothing but a real difference can show.
    network, gating = make(name, options)
    network.double()
    x = torch.randn(2, 3, *size).double()
    gates = [g.double() for g in random_gates(gating.widths, 2)]
    for g in gates:
        g[:, 0] += 0.1  # none is empty: a unit that stays in spite of that would count
    logits = gating(network, x, gates)
    macs = count_macs(gating, size, gates)
    for image in range(2):
        small, small_gating, kept = narrowed_for(network, gating, gates, image)
        alone = x[image : image + 1]
        torch.testing.assert_close(small_gating(small, alone, kept), logits[image : image + 1])
        assert type(small) is type(network)
        assert list(small_gating.widths) == [g.shape[1] for g in kept]
        assert counted_macs(small_gating, small, alone, kept) == macs[image]
        assert counted_macs(small, alone) == count_macs(small_gating, size) == macs[image]


@pytest.mark.parametrize(("name", "options", "size"), CASES, ids=IDS)
@torch.no_grad()
def test_closed_gates_equal_removed_channels_in_single_precision(name, options, size) -> None:
    model = create_model(name, **options).eval()
    x = torch.randn(1, 3, *size)
    gates = random_gates(model.gating.widths, 1)
    small, small_gating, kept = narrowed_for(model.network, model.gating, gates, 0)
    expected = model.gating(model.network, x, gates)
    torch.testing.assert_close(small_gating(small, x, kept), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "options", "size"), CASES, ids=IDS)
@torch.no_grad()
def test_open_gates_equal_the_dense_network_bit_for_bit(name, options, size) -> None:
    for training in (False, True):
        network, gating = make(name, options)
        network.train(training)
        x = torch.randn(2, 3, *size)
        ones = [torch.ones(2, w) for w in gating.widths]
        state = {n: t.clone() for n, t in network.state_dict().items()}
        dense = network(x)
        after = {n: t.clone() for n, t in network.state_dict().items()}
        for gates in (None, ones):
            network.load_state_dict(state)
            assert torch.equal(gating(network, x, gates), dense)
            assert all(torch.equal(t, after[n]) for n, t in network.state_dict().items())


@pytest.mark.parametrize("density", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "gates"),
    [("vgg11", "inner"), ("resnet20", "inner"), ("resnet18_cifar", "inner"), ("resnet18", "all")],
)
@torch.no_grad()
def test_layers_without_any_channel_left(name: str, gates: str, density: float) -> None:
    network, gating = make(name, {"gates": gates})
    x = torch.randn(1, 3, 32, 32)
    closed = random_gates(gating.widths, 1, density)
    closed[2] = torch.zeros_like(closed[2])
    small, small_gating, kept = narrowed_for(network, gating, closed, 0)
    expected = gating(network, x, closed)
    torch.testing.assert_close(small_gating(small, x, kept), expected, atol=1e-5, rtol=1e-5)
    # What is left of an empty group is read by nobody, whatever its gate is.
    open_again = [torch.where(g.sum() > 0, g, 1.0) for g in kept]
    torch.testing.assert_close(small_gating(small, x, open_again), expected, atol=1e-5, rtol=1e-5)
    # It costs what one channel costs; to those who count by gates, nothing.
    assert counted_macs(small, x) == count_macs(small_gating, 32)
    macs = count_macs(gating, 32, closed)[0]
    assert count_macs(small_gating, 32, kept)[0] == macs < count_macs(small_gating, 32)


@torch.no_grad()
def test_a_narrowed_network_can_be_narrowed_again_and_saved() -> None:
    network, gating = make("resnet18", {"gates": "all", "classes": 10})
    x = torch.randn(1, 3, 32, 32)
    first = random_gates(gating.widths, 1, 0.8)
    small, small_gating, kept = narrowed_for(network, gating, first, 0)
    second = [g * (torch.rand_like(g) < 0.7) for g in kept]
    smaller, smaller_gating, kept_twice = narrowed_for(small, small_gating, second, 0)
    expected = small_gating(small, x, second)
    torch.testing.assert_close(
        smaller_gating(smaller, x, kept_twice), expected, atol=1e-5, rtol=1e-5
    )
    other = copy.deepcopy(small)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(small.state_dict())
    assert torch.equal(small_gating(other, x, kept), small_gating(small, x, kept))
    assert torch.equal(other(x), small(x))


def test_narrowing_copies_weights() -> None:
    network, gating = make("resnet20", {})
    before = {n: t.clone() for n, t in network.state_dict().items()}
    small, _, left = gating.narrow(network, [torch.ones(w) for w in gating.widths])
    assert [len(units) for units in left] == list(gating.widths)
    assert small.state_dict().keys() == before.keys()
    with torch.no_grad():
        for tensor in small.state_dict().values():
            tensor.zero_()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.requires_grad for p in small.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vgg11", {"widths": [4] * 8}),
        ("resnet20", {}),
        ("resnet18", {"widths": [4] * 8, "gates": "all", "classes": 100}),
    ],
)
def test_gate_gradients_agree_with_finite_differences(name: str, options: dict) -> None:
    network, gating = make(name, options)
    network.double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.double)
    gates = [torch.rand(2, w).double() + 0.1 for w in gating.widths]
    gates = [g.requires_grad_() for g in gates]
    weights = torch.randn(2, 100).double()

    def loss() -> torch.Tensor:
        return (gating(network, x, gates) * weights).sum()

    gradients = torch.autograd.grad(loss(), gates)
    step = 1e-6
    with torch.no_grad():
        for gate, gradient in zip(gates, gradients, strict=True):
            for image, channel in [(0, 0), (1, gate.shape[1] - 1)]:
                gate[image, channel] += step
                above = loss()
                gate[image, channel] -= 2 * step
                below = loss()
                gate[image, channel] += step
                slope = (above - below) / (2 * step)
                torch.testing.assert_close(slope, gradient[image, channel], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_a_gate_multiplies_what_the_next_convolution_reads(training: bool) -> None:
    network, gating = make("vgg11", {"widths": [4, 5, 6, 7, 6, 5, 4, 3]})
    network.train(training)
    x = torch.randn(3, 3, 32, 32)
    gates = random_gates(gating.widths, 3)
    found = gating(copy.deepcopy(network), x, gates)
    left = [torch.ones(3, 3), *gates]
    for module in network.features:
        if isinstance(module, nn.Conv2d):  # behind norm, ReLU and pooling of the one before
            x = x * left.pop(0)[:, :, None, None]
        x = module(x)
    torch.testing.assert_close(found, network.classifier(x.mean(dim=(2, 3))))


def read_and_made(
    network: nn.Module, gating: Gating, x: Tensor, gates: Sequence[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """What each layer reads and makes."""
    found, hooks = {}, []
    for layer in gating.graph.layers:
        hook = lambda _m, x, y, path=layer.path: found.update({path: (x[0], y)})  # noqa: E731
        hooks.append(network.get_submodule(layer.path).register_forward_hook(hook))
    gating(network, x, gates)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vgg11", {"widths": [8] * 8}),
        ("resnet20", {"wide": 0.5}),
        ("resnet50", {"widths": [6] * 32, "classes": 10}),
        ("resnet18", {"widths": [6] * 8, "classes": 10, "gates": "all"}),
    ],
)
@torch.no_grad()
def test_what_reads_gated_channels_is_the_papers_mixture_of_experts(name, options) -> None:
    network, gating = make(name, options)
    network.double()
    x = torch.randn(2, 3, 32, 32).double()
    ones = [torch.ones(2, w).double() for w in gating.widths]
    experts = read_and_made(network, gating, x, ones)
    strides = set()
    for number, group in enumerate(gating.gated):
        reader = gating.graph.groups[group].readers[0]
        gates = [*ones]
        gates[number] = random_gates([gating.widths[number]], 2)[0].double()
        conv = network.get_submodule(reader)
        geometry = {"stride": conv.stride, "padding": conv.padding}
        mixture = mixture_of_experts_conv2d(
            experts[reader][0], conv.weight, gates[number], **geometry
        )
        made = read_and_made(network, gating, x, gates)[reader][1]
        torch.testing.assert_close(made, mixture)
        assert not torch.allclose(made, experts[reader][1])
        strides.add(conv.stride)
    assert ((2, 2) in strides) == (name == "resnet50")  # its inner convolutions subsample


def test_gates_of_the_wrong_shape_are_refused() -> None:
    network, gating = make("resnet20", {})
    gating.check([torch.ones(1, w) for w in gating.widths])
    with pytest.raises(UserError, match="gates of widths"):
        gating.check([torch.ones(1, 3)])
    with pytest.raises(UserError, match="gates of widths"):
        gating.check([torch.ones(w) for w in gating.widths])
    with pytest.raises(UserError, match="masks"):
        gating.narrow(network, [torch.ones(3)])
