"""The greedy choice against one that adds everything up anew each time."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare_networks import CLASSES, Chain, Mobile, loader, small_images, task_of
from torch import Tensor, nn

from deepmoe.compare import thinet
from deepmoe.compare.samples import training_images


def brute_force(x: np.ndarray, count: int) -> list[int]:
    """Columns that go, by the squared sum over rows, computed from scratch for each candidate."""
    gone: list[int] = []
    for _ in range(count):
        others = [j for j in range(x.shape[1]) if j not in gone]
        costs = [np.square(x[:, [*gone, j]].sum(axis=1)).sum() for j in others]
        gone.append(others[int(np.argmin(costs))])
    return gone


@pytest.mark.parametrize("count", [0, 1, 5, 11])
def test_the_greedy_choice_and_its_factors_are_those_of_a_plain_reference(count: int) -> None:
    x = np.random.default_rng(0).normal(size=(60, 12)) + np.linspace(-1, 1, 12)
    gram = torch.from_numpy(x.T @ x)
    gone = thinet.least_felt(gram, count)
    assert gone == brute_force(x, count)
    stays = torch.ones(12, dtype=torch.bool)
    stays[gone] = False
    expected = np.zeros(12)
    expected[stays.numpy()] = np.linalg.lstsq(x[:, stays.numpy()], x.sum(axis=1), rcond=None)[0]
    np.testing.assert_allclose(thinet.factors_for(gram, stays).numpy(), expected, rtol=1e-5)


def terms(conv: nn.Conv2d, x_BCHW: Tensor) -> np.ndarray:
    """What each channel adds to the one output of a convolution, at every position."""
    found = [F.conv2d(x_BCHW[:, [c]], conv.weight[:, [c]]) for c in range(conv.in_channels)]
    return torch.cat(found, dim=1).permute(0, 2, 3, 1).flatten(0, 2).numpy()


@torch.no_grad()
def test_layers_are_thinned_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one output and all positions there is nothing left to be drawn."""
    monkeypatch.setattr("deepmoe.compare.passes.POSITIONS", 1000)

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(3, 8, 3)
            self.two = nn.Conv2d(8, 1, 3, bias=False)
            self.three = nn.Conv2d(1, 6, 2)
            self.four = nn.Conv2d(6, 1, 1)
            self.fc = nn.Linear(1, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.three(F.relu(self.two(F.relu(self.one(x))))))
            return self.fc(F.relu(self.four(y)).mean(dim=(2, 3)))

    x = small_images(40)
    task = task_of(Narrow(), x, widths={"one": 5, "three": 2})
    new = copy.deepcopy(task.model.network)
    read, masks = F.relu(new.one(x)), []
    for conv, count in ((new.two, 3), (new.four, 4)):
        added = terms(conv, read)
        gone = brute_force(added, count)
        masks.append(torch.ones(conv.in_channels, dtype=torch.bool))
        masks[-1][gone] = False
        kept = masks[-1].numpy()
        scale = np.linalg.lstsq(added[:, kept], added.sum(axis=1), rcond=None)[0]
        conv.weight[:, gone] = 0
        conv.weight[:, kept] *= torch.from_numpy(scale)[None, :, None, None]
        read = F.relu(new.three(F.relu(conv(read)))) if conv is new.two else None

    choice = thinet.select(task)
    found = dict(zip(task.gating.names, choice.masks, strict=True))
    assert torch.equal(found["one"], masks[0]) and torch.equal(found["three"], masks[1])
    for name, value in new.state_dict().items():
        torch.testing.assert_close(choice.network.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_all_outputs_of_the_next_layer_are_asked() -> None:
    """Each channel is read by one output of its own, but for one that nobody reads."""
    network = Chain()
    task = task_of(network, small_images(), widths={"one": 7})
    network.norm1.bias.fill_(1)
    network.two.weight.zero_()
    for channel in (0, 1, 2, 4, 5, 6, 7):
        network.two.weight[channel - (channel > 3), channel] = 1
    assert thinet.select(task).masks[0].tolist() == [c != 3 for c in range(8)]


@torch.no_grad()
@pytest.mark.parametrize("make", [Chain, Mobile])
def test_factors_beat_removal_and_the_model_stays_as_it_is(make: type[nn.Module]) -> None:
    task = task_of(make(), small_images(200), share=0.6)
    before = copy.deepcopy(task.model.network.state_dict())
    choice = thinet.select(task)
    for name, value in task.model.network.state_dict().items():
        assert torch.equal(value, before[name])
    fresh = small_images(100)
    errors = []
    for network in (choice.network, task.model.network):
        small, _, _ = task.gating.narrow(network, choice.masks)
        errors.append(float((small(fresh) - task.model.network(fresh)).square().mean()))
    assert errors[0] < errors[1]


def test_a_seed_gives_one_answer() -> None:
    task = task_of(Chain(), small_images())
    weights = [
        thinet.select(replace(task, seed=seed)).network.two.weight.detach() for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.allclose(weights[0], weights[2])


def test_ten_images_of_a_class_are_looked_at() -> None:
    images = small_images(100)
    labels = torch.tensor([0] * 70 + [1] * 5 + [2] * 25)
    task = replace(task_of(Chain(), images), loader=loader(images, labels))
    found = torch.cat(training_images(task, 1000, of_class=10))
    expected = [*range(10), *range(70, 85)]
    torch.testing.assert_close(found, images[expected])
    assert len(torch.cat(training_images(task, 7, of_class=10))) == 7
    assert len(torch.cat(training_images(task, 60))) == 60
