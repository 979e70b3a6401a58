"""Gates against physically smaller networks, and costs against PyTorch's own counter."""

import pytest
import torch
from helpers import counted_macs, narrowed_for, random_gates, randomise_statistics

from deepmoe.backbones import Backbone
from deepmoe.costs import count_macs
from deepmoe.errors import UserError
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
    ("resnet18", {"classes": 10}, (64, 64)),
    ("resnet18", {"classes": 10, "gates": "all"}, (65, 50)),
    ("resnet50", {"classes": 10}, (64, 64)),
    ("resnet50", {"classes": 10, "block": "bottleneck-b", "wide": 2, "gates": "all"}, (64, 64)),
    ("drn_a_50", {}, (41, 64)),
    ("drn_a_50", {"block": "bottleneck-b", "gates": "all"}, (40, 40)),
]
IDS = [f"{name}-{'-'.join(map(str, options))}-{size[0]}x{size[1]}" for name, options, size in CASES]


def make(name: str, options: dict) -> Backbone:
    return randomise_statistics(create_model(name, **options).backbone).eval()


@pytest.mark.parametrize(("name", "options", "size"), CASES, ids=IDS)
@torch.no_grad()
def test_closed_gates_equal_physically_removed_channels(name, options, size) -> None:
    # In double precision, so that nothing but a real difference can show.
    backbone = make(name, options).double()
    x = torch.randn(2, 3, *size).double()
    gates = [g.double() for g in random_gates(backbone.gate_widths, 2)]
    logits = backbone(x, gates)
    macs = count_macs(backbone, size, gates)
    for image in range(2):
        small, kept = narrowed_for(backbone, gates, image)
        alone = x[image : image + 1]
        torch.testing.assert_close(small(alone, kept), logits[image : image + 1])
        assert type(small) is type(backbone)
        assert list(small.gate_widths) == [g.shape[1] for g in kept]
        assert counted_macs(small, alone, kept) == macs[image]


@pytest.mark.parametrize(("name", "options", "size"), CASES, ids=IDS)
@torch.no_grad()
def test_closed_gates_equal_removed_channels_in_single_precision(name, options, size) -> None:
    backbone = create_model(name, **options).backbone.eval()
    x = torch.randn(1, 3, *size)
    gates = random_gates(backbone.gate_widths, 1)
    small, kept = narrowed_for(backbone, gates, 0)
    torch.testing.assert_close(small(x, kept), backbone(x, gates), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "options", "size"), CASES, ids=IDS)
@torch.no_grad()
def test_open_gates_equal_the_dense_network_bit_for_bit(name, options, size) -> None:
    for training in (False, True):
        backbone = make(name, options).train(training)
        x = torch.randn(2, 3, *size)
        ones = [torch.ones(2, w) for w in backbone.gate_widths]
        state = {n: t.clone() for n, t in backbone.state_dict().items()}
        dense = backbone(x, None)
        backbone.load_state_dict(state)
        assert torch.equal(backbone(x, ones), dense)


@pytest.mark.parametrize("density", [0.0, 0.1])
@pytest.mark.parametrize("name", ["vgg11", "resnet20", "resnet18_cifar"])
@torch.no_grad()
def test_layers_without_any_channel_left(name: str, density: float) -> None:
    backbone = make(name, {})
    x = torch.randn(1, 3, 32, 32)
    gates = random_gates(backbone.gate_widths, 1, density)
    gates[2] = torch.zeros_like(gates[2])
    small, kept = narrowed_for(backbone, gates, 0)
    torch.testing.assert_close(small(x, kept), backbone(x, gates), atol=1e-5, rtol=1e-5)
    assert counted_macs(small, x, kept) == count_macs(backbone, 32, gates)[0]


@torch.no_grad()
def test_a_narrowed_network_can_be_narrowed_again_and_saved() -> None:
    backbone = make("resnet20", {"gates": "all"})
    x = torch.randn(1, 3, 16, 16)
    first = random_gates(backbone.gate_widths, 1, 0.8)
    small, kept = narrowed_for(backbone, first, 0)
    second = [g * (torch.rand_like(g) < 0.7) for g in kept]
    smaller, kept_twice = narrowed_for(small, second, 0)
    expected = small(x, second)
    torch.testing.assert_close(smaller(x, kept_twice), expected, atol=1e-5, rtol=1e-5)
    copy = small.resized(small.gate_widths)
    copy.load_state_dict(small.state_dict())
    assert torch.equal(copy.eval()(x, kept), small(x, kept))


def test_narrowing_copies_weights() -> None:
    backbone = make("resnet20", {})
    small = backbone.narrow([torch.ones(w) for w in backbone.gate_widths])
    with torch.no_grad():
        small.stem.conv.weight.zero_()
    assert (backbone.stem.conv.weight != 0).any()
    assert all(p.requires_grad for p in small.parameters())


@pytest.mark.parametrize(("name", "options"), [("vgg11", {"widths": [4] * 8}), ("resnet20", {})])
def test_gate_gradients_agree_with_finite_differences(name: str, options: dict) -> None:
    backbone = make(name, options).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.double)
    gates = [torch.rand(2, w).double() + 0.1 for w in backbone.gate_widths]
    gates = [g.requires_grad_() for g in gates]
    weights = torch.randn(2, 100).double()

    def loss() -> torch.Tensor:
        return (backbone(x, gates) * weights).sum()

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


def test_gates_of_the_wrong_shape_are_refused() -> None:
    backbone = make("resnet20", {})
    x = torch.randn(1, 3, 16, 16)
    with pytest.raises(UserError, match="gates of widths"):
        backbone(x, [torch.ones(1, 3)])
    with pytest.raises(UserError, match="masks"):
        backbone.narrow([torch.ones(3)])
