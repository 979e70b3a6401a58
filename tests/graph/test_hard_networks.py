"""Networks whose code is easily misunderstood: they are gated rightly, or refused in a sentence."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepmoe
from deepmoe.deploy import static_network
from deepmoe.errors import UserError
from deepmoe.graph import NothingToGate

IMAGES = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))


class Hard(nn.Module):
    """Convolutions, and something between them."""

    def __init__(self, middle: Callable[["Hard", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.two, self.three = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)
        self.extra, self.grouped = nn.Conv2d(2, 16, 3), nn.Conv2d(16, 16, 3, groups=2)
        self.still = nn.BatchNorm2d(16, affine=False)
        self.batch = nn.BatchNorm2d(16, track_running_stats=False)
        self.register_buffer("order", torch.arange(16).flip(0))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))
        self.between, self.last = nn.Linear(16, 16), nn.Linear(16, 5)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self, F.relu(self.norm(self.one(x))))
        return self.last(F.relu(self.three(x)).mean(dim=(2, 3)))


def in_place(net: Hard, x: Tensor) -> Tensor:
    x = x - 0.5
    x[:, :8].relu_()
    return net.two(x)


def frozen(net: Hard, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.two(x)


def in_half(net: Hard, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.two(x).float()


def shuffled(net: Hard, x: Tensor) -> Tensor:
    x = net.grouped(x)
    b, c, h, w = x.shape
    return net.two(x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w))


def by_position(net: Hard, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    flat = net.between(x.permute(0, 2, 3, 1).reshape(-1, c))
    return net.two(flat.reshape(b, h, w, c).permute(0, 3, 1, 2))


def in_export(net: Hard, x: Tensor) -> Tensor:
    if x.shape[-1] < 4:  # which a tracer can't answer
        raise ValueError
    return net.two(net.still(x))


REFUSED: dict[str, tuple[Callable[[Hard, Tensor], Tensor], str]] = {
    "parts in place": (in_place, "in place"),
    "no gradients on the way": (frozen, "requires_grad_"),
    "autocast on the way": (
        in_half,
        "autocast around the model",
    ),
    "a mean over images": (lambda net, x: net.two(x - x.mean(0, keepdim=True)), "mixes the images"),
    "statistics of the batch": (lambda net, x: net.two(net.batch(x)), "track_running_stats=True"),
    "batch norm by hand": (
        lambda net, x: net.two(F.batch_norm(x, net.mean, net.var, training=net.training)),
        "use nn.BatchNorm2d",
    ),
    "a weight used twice": (
        lambda net, x: (
            net.two(x) - F.conv2d(x, net.two.weight.sum((2, 3), keepdim=True))[..., 1:-1, 1:-1]
        ),
        "two.weight is also used outside",
    ),
}
HELD: dict[str, Callable[[Hard, Tensor], Tensor]] = {
    "every other channel first": lambda net, x: net.two(torch.cat([x[:, ::2], x[:, 1::2]], 1)),
    "a grouped shuffle": shuffled,
    "the first two apart": lambda net, x: net.two(x) + net.extra(x[:, :2]),
    "the last two apart": lambda net, x: net.two(x) + net.extra(x[:, -2:]),
    "an order in a buffer": lambda net, x: net.two(x[:, net.order]),
    "ones around": lambda net, x: net.two(F.pad(x, (0, 0, 0, 0, 1, 1), value=1.0)[:, 1:-1]),
    "a limit that is a tensor": lambda net, x: torch.clamp(net.two(x), max=net.grouped(x)),
    "linear by position": by_position,
    "a layer by keyword": lambda net, x: net.two(input=x),
    "dropout that is always on": lambda net, x: net.two(F.dropout(x, 0.0, True)),
    "a norm without weights, exported": in_export,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_right_is_refused(name: str) -> None:
    middle, words = REFUSED[name]
    with pytest.raises(UserError) as raised:
        deepmoe.gate(Hard(middle), IMAGES)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("where", ["inner", "all"])
@pytest.mark.parametrize("name", HELD)
@pytest.mark.filterwarnings("ignore:.* stays ungated")
def test_every_rule_holds(name: str, where: str) -> None:
    network = Hard(HELD[name]).eval()
    try:
        model = deepmoe.gate(network, IMAGES, where=where)
    except NothingToGate:
        return  # it says so
    found = deepmoe.check(model, IMAGES)
    assert found.passed, str(found)
    generator = torch.Generator().manual_seed(1)
    route = torch.rand(sum(model.gating.widths), generator=generator).sub(0.5).relu()
    gates = [g.expand(len(IMAGES), -1) for g in route.split(model.gating.widths)]
    with torch.no_grad():
        expected = model.gating(network, IMAGES, gates)
        torch.testing.assert_close(static_network(model, route)(IMAGES), expected)
        try:
            wide = deepmoe.widen(model, 2)
        except UserError as error:
            assert "can't be widened" in str(error)
        else:
            torch.testing.assert_close(wide(IMAGES).logits, model(IMAGES).logits)


@pytest.mark.parametrize("name", [n for n in HELD if "dropout" not in n and "limit" not in n])
@pytest.mark.filterwarnings("ignore:.* stays ungated")
def test_training_is_that_of_the_network(name: str) -> None:
    model = deepmoe.gate(Hard(HELD[name]), IMAGES, where="all").train()
    original = copy.deepcopy(model.network)
    ones = [torch.ones(len(IMAGES), w) for w in model.gating.widths]
    expected, found = original(IMAGES), model.gating(model.network, IMAGES, ones)
    torch.testing.assert_close(found, expected)
    for (path, one), (_, other) in zip(
        original.named_buffers(), model.network.named_buffers(), strict=True
    ):
        torch.testing.assert_close(one, other, msg=path)


@torch.no_grad()
@pytest.mark.parametrize(("captured", "other"), [(24, 128), (128, 24)])
def test_a_branch_on_the_size_of_images_fixes_it(captured: int, other: int) -> None:
    def middle(net: Hard, x: Tensor) -> Tensor:
        return net.two(F.max_pool2d(x, 4) if x.shape[-1] > 100 else x)

    model = deepmoe.gate(Hard(middle), torch.randn(2, 3, captured, captured)).eval()
    with pytest.raises(UserError, match=f"captured for images of {captured}x{captured} px"):
        model(torch.randn(1, 3, other, other))


def test_a_normal_network_keeps_its_contexts() -> None:
    with warnings.catch_warnings(action="error"):
        deepmoe.gate(Hard(lambda net, x: net.two(x)), IMAGES)
    with torch.no_grad():
        assert not torch.ones(1, requires_grad=True).mul(2).requires_grad
