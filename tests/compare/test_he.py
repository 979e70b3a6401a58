"""LASSO and reconstruction against the paper's equations, written out row by row."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare_networks import Chain, Mobile, Residual, small_images, task_of
from sklearn.linear_model import Lasso
from torch import Tensor, nn

from deepmoe.compare import Choice, PruningTask, he
from deepmoe.compare.least_squares import corrections
from deepmoe.errors import UserError
from deepmoe.pruning import prune_module

pytestmark = pytest.mark.usefixtures("all_positions")


@pytest.fixture
def all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position is sampled, so that a reference needs no luck."""
    monkeypatch.setattr("deepmoe.compare.passes.POSITIONS", 1000)


def rows(conv: nn.Conv2d, x_BCHW: Tensor) -> np.ndarray:
    """What a convolution reads at every position of every image: (rows, channels, places)."""
    (high, wide), (down, across) = conv.kernel_size, conv.stride
    x = F.pad(x_BCHW, (conv.padding[1], conv.padding[1], conv.padding[0], conv.padding[0]))
    found = [
        image[:, top : top + high, left : left + wide].flatten(1)
        for image in x
        for top in range(0, x.shape[2] - high + 1, down)
        for left in range(0, x.shape[3] - wide + 1, across)
    ]
    return torch.stack(found).numpy()


def outputs(y_BOHW: Tensor) -> np.ndarray:
    return y_BOHW.permute(0, 2, 3, 1).flatten(0, 2).numpy()


def chosen(x: np.ndarray, weight: np.ndarray, y: np.ndarray, count: int) -> np.ndarray:
    """Channels that stay, by scikit-learn's LASSO on all rows and outputs."""
    z = np.einsum("nck,ock->noc", x, weight).reshape(-1, x.shape[1])
    flat = y.reshape(-1)

    def left(penalty: float) -> np.ndarray:
        solver = Lasso(alpha=penalty / len(z), fit_intercept=False, max_iter=100_000, tol=1e-8)
        return solver.fit(z, flat).coef_

    low, high = 0.0, 1e-4 * np.abs(z.T @ flat).max()
    while np.count_nonzero(left(high)) >= count:
        low, high = high, 2 * high
    while True:
        middle = (low + high) / 2
        b = left(middle)
        if count <= np.count_nonzero(b) <= 1.1 * count:
            return np.sort(np.argsort(-np.abs(b))[:count])
        low, high = (middle, high) if np.count_nonzero(b) >= count else (low, middle)


def refitted(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and intercept of least squares."""
    x = np.concatenate([x.reshape(len(x), -1), np.ones((len(x), 1))], axis=1)
    solution = np.linalg.lstsq(x, y, rcond=None)[0]
    return solution[:-1].T, solution[-1]


def set_weight(conv: nn.Conv2d, kept: np.ndarray, weight: np.ndarray) -> None:
    """Weights of the channels that stay; nothing is read of the others."""
    shape = (conv.out_channels, len(kept), *conv.kernel_size)
    conv.weight.zero_()
    conv.weight[:, kept] = torch.from_numpy(weight).view(shape)


def assert_same(choice: Choice, task: PruningTask, network: nn.Module) -> None:
    """Weights are those of a network, where channels are left."""
    small, _, _ = task.gating.narrow(choice.network, choice.masks)
    expected, _, _ = task.gating.narrow(network, choice.masks)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(small.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_chain_is_chosen_and_refitted_as_the_equations_say() -> None:
    x = small_images(24)
    task = task_of(Chain(), x, widths={"one": 5, "two": 3})
    old = task.model.network
    new = copy.deepcopy(old)

    y1 = F.relu(old.norm1(old.one(x)))
    read, target = rows(old.two, y1), outputs(old.two(y1))
    first = chosen(read, old.two.weight.flatten(2).numpy(), target, 5)
    weight, intercept = refitted(read[:, first], target)
    set_weight(new.two, first, weight)
    new.norm2.running_mean -= torch.from_numpy(intercept)

    y2_old = F.relu(old.norm2(old.two(y1)))
    y2 = F.relu(new.norm2(new.two(F.relu(new.norm1(new.one(x))))))
    read = rows(old.three, y2)
    target = outputs(old.three(y2_old)) - old.three.bias.numpy()
    second = chosen(read, old.three.weight.flatten(2).numpy(), target, 3)
    weight, intercept = refitted(read[:, second], target)
    set_weight(new.three, second, weight)
    new.three.bias += torch.from_numpy(intercept)

    choice = he.select(task)
    assert choice.masks[0].nonzero().flatten().tolist() == first.tolist()
    assert choice.masks[1].nonzero().flatten().tolist() == second.tolist()
    assert choice.masks[2].all()
    assert_same(choice, task, new)


@torch.no_grad()
def test_the_last_convolution_of_a_block_makes_up_for_the_shortcut() -> None:
    x = small_images(64)
    task = task_of(Residual(), x, widths={"blocks.0.conv1": 3, "blocks.1.conv1": 4})
    old = task.model.network
    new = copy.deepcopy(old)
    then = now = F.relu(old.stem(x))
    kept = []
    for number, count in enumerate((3, 4)):
        before, after = old.blocks[number], new.blocks[number]
        inner_then = F.relu(before.bn1(before.conv1(then)))
        read = rows(before.conv2, F.relu(after.bn1(after.conv1(now))))
        norm = before.bn2
        scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).numpy()
        # Behind the norm, block and shortcut together are to give what they gave.
        target = outputs(before.conv2(inner_then)) * scale + outputs(then - now)
        weight = before.conv2.weight.flatten(2).numpy() * scale[:, None, None]
        kept.append(chosen(read, weight, target, count))
        weight, intercept = refitted(read[:, kept[-1]], target)
        set_weight(after.conv2, kept[-1], weight / scale[:, None])
        after.bn2.running_mean -= torch.from_numpy(intercept / scale)
        then, now = before(then.clone()), after(now.clone())
        assert not torch.allclose(then, now, rtol=0.01)

    choice = he.select(task)
    masks = dict(zip(task.gating.names, choice.masks, strict=True))
    for number in range(2):
        mask = masks[f"blocks.{number}.conv1"]
        assert mask.nonzero().flatten().tolist() == kept[number].tolist()
    assert all(m.all() for name, m in masks.items() if not name.startswith("blocks"))
    assert_same(choice, task, new)


@torch.no_grad()
@pytest.mark.parametrize("make", [Chain, Residual, Mobile])
def test_reconstruction_beats_removal_and_leaves_the_model_alone(make: type[nn.Module]) -> None:
    task = task_of(make(), small_images(200), share=0.6)
    before = copy.deepcopy(task.model.network.state_dict())
    choice = he.select(task)
    for name, value in task.model.network.state_dict().items():
        assert torch.equal(value, before[name])
    assert sum(int((~mask).sum()) for mask in choice.masks) > 3
    fresh = small_images(100)
    expected = task.model.network(fresh)
    errors = []
    for network in (choice.network, task.model.network):
        small, _, _ = task.gating.narrow(network, choice.masks)
        errors.append(float((small(fresh) - expected).square().mean()))
    assert errors[0] < 0.9 * errors[1]


@torch.no_grad()
def test_weights_that_no_sample_tells_of_stay() -> None:
    """Channels that never fire leave their weights open; so do fewer samples than weights."""
    network = Chain()
    task = task_of(network, small_images(6), widths={"one": 6})
    network.norm1.weight[:6], network.norm1.bias[:6] = 0, -1
    choice = he.select(task)
    assert choice.masks[0][6:].all() and int(choice.masks[0].sum()) == 6
    silent = choice.masks[0].clone()
    silent[6:] = False
    assert torch.equal(choice.network.two.weight[:, silent], network.two.weight[:, silent])
    assert all(bool(p.isfinite().all()) for p in choice.network.parameters())


def test_a_seed_gives_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepmoe.compare.passes.POSITIONS", 2)
    task = task_of(Chain(), small_images())
    seeds = (0, 0, 1)
    one, same, other = (he.select(replace(task, seed=seed)).network.two.weight for seed in seeds)
    assert torch.equal(one, same) and not torch.allclose(one, other)


@pytest.mark.parametrize(
    "made",
    [
        {"padding": "same", "dilation": (1, 2)},
        {"padding": 1, "padding_mode": "reflect", "stride": (2, 1)},
        {"padding": (0, 2), "padding_mode": "circular"},
    ],
)
def test_what_convolutions_read_is_found_whatever_their_form(made: dict[str, object]) -> None:
    """A layer whose inputs were taken wrongly would be refused."""
    network = Chain()
    network.two = nn.Conv2d(8, 7, 3, **made)
    assert he.select(task_of(network, small_images())).masks[0].sum() < 8


def test_a_layer_that_can_not_be_followed_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = task_of(Chain(), small_images())
    task.model.network.two.stride = (1, 1)  # since it was described
    monkeypatch.setattr("deepmoe.compare.passes._patches", lambda conv, x, *_: other(conv, x))

    def other(conv: nn.Conv2d, x: Tensor) -> Tensor:
        return torch.zeros(len(x) * x.shape[2] * x.shape[3], conv.in_channels, 9).to(x)

    with pytest.raises(UserError, match="two is more than a plain layer"):
        he.select(task)


def test_inputs_that_never_vary_change_nothing() -> None:
    """Rounding is all that is left of them once their means are taken off."""
    x_NJ = torch.ones(1000, 8).double() * torch.linspace(0.3, 1.3, 8).double()
    for noise in (0.0, 1e-9):
        noisy = x_NJ + noise * torch.randn(1000, 8).double()
        means = torch.outer(noisy.sum(0), noisy.sum(0)) / 1000
        gram = noisy.T @ noisy
        scale = gram.diagonal().mean()
        added = corrections(gram - means, torch.zeros(8, 2).double(), scale)
        assert torch.equal(added, torch.zeros_like(added))


class Level(nn.Module):
    """Its last norm gives every channel a level of its own, whatever comes in; then a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.classify = nn.Linear(8, 4)
        nn.init.zeros_(self.last[1].weight)
        self.last[1].bias.data.copy_(torch.linspace(0.3, 1.3, 8))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.classify(self.last(self.first(x_BCHW)).mean((2, 3)))


def test_a_network_that_has_collapsed_is_pruned_all_the_same() -> None:
    images = small_images()
    network = Level().double().eval()
    some = [(images, torch.zeros(len(images)).long())]
    small = prune_module(network, images, 0.5, some, by="he")
    assert all(bool(p.isfinite().all()) for p in small.parameters())
    assert small.last[0].out_channels < 8
