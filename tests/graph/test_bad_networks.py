"""What can't be gated gets one sentence, whatever it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepmoe
from deepmoe.errors import UserError

IMAGES = torch.randn(2, 3, 16, 16)


def network(inputs: int = 3) -> nn.Sequential:
    """Of two convolutions, of which the first can be gated."""
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return nn.Sequential(nn.Conv2d(inputs, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), *pool)


class Around(nn.Module):
    """Parts, and what is done with them."""

    def __init__(self, does: Callable[..., object], *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.does = does

    def forward(self, x: Tensor) -> object:
        return self.does(x, *self.parts)


def three_layers(does: Callable[..., object]) -> Around:
    return Around(does, nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, 5))


def in_order(
    x: Tensor, one: nn.Module, two: nn.Module, three: nn.Module, last: nn.Module
) -> Tensor:
    return last(three(F.relu(two(F.relu(one(x))))).mean(dim=(2, 3)))


def with_one_weight() -> nn.Module:
    made = three_layers(in_order)
    made.parts[2].weight = made.parts[1].weight
    return made


def with_one_bias() -> nn.Module:
    made = three_layers(in_order)
    made.parts[2].bias = made.parts[1].bias
    return made


def with_one_norm() -> nn.Module:
    def forward(x: Tensor, one: nn.Module, norm: nn.Module, two: nn.Module, last: nn.Module):
        return last(norm(two(norm(one(x)))).mean(dim=(2, 3)))

    parts = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3), nn.Linear(6, 5))
    return Around(forward, *parts)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.inner(x + other)


def gated() -> nn.Module:
    return deepmoe.gate(network(), IMAGES)


# What it is, how it is made, and what the sentence says.
NETWORKS: list[tuple[str, Callable[[], Any], list[str]]] = [
    (
        "branches on values",
        lambda: Around(lambda x, inner: inner(x if x.mean() > 0 else -x), network()),
        ["can't be captured", "branch on nothing but shapes"],
    ),
    (
        "has no convolution",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 5)),
        ["has no convolution"],
    ),
    (
        "gives two tensors",
        lambda: Around(lambda x, inner: (inner(x), x), network()),
        ["gives 2 tensors in a tuple", "returns its logits alone"],
    ),
    (
        "gives two tensors by name",
        lambda: Around(lambda x, inner: {"logits": inner(x), "features": x}, network()),
        ["gives 2 tensors in a dict", "returns its logits alone"],
    ),
    (
        "gives nothing",
        lambda: Around(lambda x, inner: None, network()),
        ["returns its logits alone"],
    ),
    (
        "gives one number for all images",
        lambda: Around(lambda x, inner: inner(x).mean(), network()),
        ["logits"],
    ),
    ("takes two inputs", TwoInputs, ["does not take images of shape (2, 3, 16, 16)", "other"]),
    (
        "calls a layer twice",
        lambda: three_layers(lambda x, one, two, three, last: in_order(x, one, two, two, last)),
        ["parts.1 is called twice", "weights of its own"],
    ),
    ("has one weight for two layers", with_one_weight, ["parts.", "weights of its own"]),
    ("has one bias for two layers", with_one_bias, ["parts.", "weights of its own"]),
    ("calls a norm twice", with_one_norm, ["parts.1 is called twice", "weights of its own"]),
    ("is gated", gated, ["gated already"]),
    ("holds what is gated", lambda: Around(lambda x, m: m(x).logits, gated()), ["gated already"]),
    ("is sparse", lambda: deepmoe.sparsify(gated()), ["gated already"]),
    (
        "has nothing to gate",
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        ["nothing in this network can be gated", "deepmoe describe"],
    ),
    (
        "never runs its convolution",
        lambda: Around(
            lambda x, _, last: last(x.flatten(1)), nn.Conv2d(3, 8, 3), nn.Linear(768, 5)
        ),
        ["nothing in this network can be gated", "deepmoe describe"],
    ),
    ("is a function", lambda: lambda x: x, ["Module"]),
    ("is a name", lambda: "resnet20", ["Module"]),
    ("is a class", lambda: nn.Conv2d, ["Module"]),
]


def refusal(*arguments: Any, **options: Any) -> str:
    """The sentence that `gate` answers with."""
    with pytest.raises(UserError) as raised:
        deepmoe.gate(*arguments, **options)
    sentence = str(raised.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("make", "words"), [case[1:] for case in NETWORKS], ids=[case[0] for case in NETWORKS]
)
def test_a_network_is_refused_that(make: Callable[[], Any], words: list[str], capfd) -> None:
    sentence = refusal(make(), IMAGES)
    for word in words:
        assert word in sentence
    assert capfd.readouterr() == ("", "")  # and nobody else has something to say


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.randn(2, 1, 16, 16), ["(2, 1, 16, 16)", "3 channels"]),
        (torch.randn(3, 16, 16), ["(3, 16, 16)"]),
        (torch.randn(2, 3, 2, 2), ["(2, 3, 2, 2)"]),
        (torch.randn(0, 3, 16, 16), ["(0, 3, 16, 16)"]),
        (torch.zeros(2, 3, 16, 16, dtype=torch.int64), ["int"]),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), ["char"]),
        (torch.randn(2, 3, 16, 16).double(), ["double"]),
        ([IMAGES], ["tensor"]),
        ((2, 3, 16, 16), ["tensor"]),
        (None, ["tensor"]),
    ],
    ids=[
        "grey",
        "one",
        "too small",
        "none",
        "integers",
        "bytes",
        "double",
        "list",
        "shape",
        "None",
    ],
)
def test_images_are_refused(images: Any, words: list[str]) -> None:
    sentence = refusal(network(), images)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("outer", ["inner, all or a list", "'outer'"]),
        ("", ["inner, all or a list"]),
        (["0", "nonsense"], ["'nonsense'", "there are 0, 2"]),
        ([77], ["77"]),
        (["5"], ["5", "can't be gated", "is the network's output"]),
        ([], ["list"]),
        (None, ["inner, all or a list"]),
        (3, ["inner, all or a list"]),
    ],
    ids=str,
)
def test_places_for_gates_are_refused(where: Any, words: list[str]) -> None:
    sentence = refusal(network(), IMAGES, where=where)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize("classes", [1, 0, -3, 10**10])
def test_numbers_of_classes_are_refused(classes: int) -> None:
    original = network()
    assert "classes" in refusal(original, IMAGES, classes=classes)
    assert original[-1].out_features == 5  # nothing was replaced


def test_a_last_layer_that_can_not_be_replaced_is_named() -> None:
    last = nn.Conv2d(6, 5, 3)  # of one position, and not of one pixel
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.AdaptiveAvgPool2d(3), last)
    sentence = refusal(nn.Sequential(*made, nn.Flatten()), IMAGES, classes=7)
    assert "the last layer, 3, can't be replaced" in sentence


def test_the_network_is_left_as_it_was_when_it_is_refused() -> None:
    original = Around(lambda x, inner: (inner(x), x), network())
    original.parts[0][0].eval()
    modes = [m.training for m in original.modules()]
    refusal(original, IMAGES)
    assert [m.training for m in original.modules()] == modes


@pytest.mark.parametrize("channels", [1, 4])
def test_images_that_are_not_of_three_colours(channels: int) -> None:
    images = torch.randn(2, channels, 16, 16)
    model = deepmoe.gate(network(channels), images)
    assert deepmoe.check(model, images).passed


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_networks_of_other_precisions(dtype: torch.dtype) -> None:
    images = IMAGES.to(dtype)
    model = deepmoe.gate(network().to(dtype), images).eval()
    ones = [torch.ones(len(images), w, dtype=dtype) for w in model.gating.widths]
    assert torch.equal(model.gating(model.network, images, ones), model.network(images))
    assert model(images).logits.dtype == dtype


@torch.no_grad()
def test_layers_that_learn_their_shapes_from_images() -> None:
    lazy = nn.Sequential(nn.LazyConv2d(8, 3), *network()[1:-1], nn.LazyLinear(5))
    model = deepmoe.gate(lazy, IMAGES)
    assert deepmoe.check(model, IMAGES).passed


def test_logits_that_are_not_all_that_the_last_layer_makes() -> None:
    sliced = Around(lambda x, inner: inner(x)[:, :3], network())
    model = deepmoe.gate(sliced, IMAGES)
    output = model(IMAGES)
    assert model.classes == output.logits.shape[1] == output.embedding_logits.shape[1] == 3


@torch.no_grad()
def test_a_tensor_that_the_code_holds() -> None:
    numbers = torch.linspace(0, 1, 3).view(3, 1, 1)
    normalised = Around(lambda x, inner: inner(x - numbers), network())
    assert deepmoe.check(deepmoe.gate(normalised, IMAGES), IMAGES).passed
