"""A captured network computes what its own forward does, in both modes; its channels are known."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from captured_networks import (
    Concatenated,
    Depthwise,
    Dropping,
    Functional,
    Gated,
    Grouped,
    InPlace,
    Linears,
    Network,
    Residual,
    Shuffled,
    Split,
    Squeezed,
    gated,
)
from torch import Tensor, nn

import deepmoe
from deepmoe.graph import describe

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
