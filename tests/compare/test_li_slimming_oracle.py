"""Masks of Li and Slimming are those of Torch-Pruning, on whole networks of the zoo."""

from functools import cache

import pytest
import torch
import torch_pruning as tp
from compare_networks import loader
from torch import Tensor, nn

from deepmoe.compare import PruningTask, li, slimming
from deepmoe.costs import cost_matrix, macs_of_counts
from deepmoe.graph import prunable
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model

IMAGES = torch.zeros(1, 3, 32, 32)


def model(name: str) -> DeepMoE:
    """Random weights and scales; a channel's shift tells its number, so that it can be traced."""
    torch.manual_seed(0)
    made = create_model(name, gates=None).eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.1, 1)
            module.bias.data = torch.arange(len(module.bias)).float()
        elif isinstance(module, nn.Conv2d):  # filters differ in size, as trained ones do
            module.weight.data *= torch.rand(len(module.weight), 1, 1, 1)
    return made


def task_for(made: DeepMoE, **settings: object) -> PruningTask:
    gating = prunable(made.gating.graph)
    return PruningTask(made, gating, 32, **{"share": 1.0, "loader": loader(IMAGES), **settings})


def norms_behind(made: DeepMoE) -> list[str]:
    """For each group that can lose channels, the norm behind the convolution that makes it."""
    groups = prunable(made.gating.graph)
    paths = []
    for name in groups.names:
        before, _, last = name.rpartition(".")
        paths.append(f"{before}.{int(last) + 1}" if last.isdigit() else f"{before}.bn1")
    return paths


@cache
def left_by_torch_pruning(name: str, criterion: str, ratio: float) -> tuple[Tensor, ...]:
    """Which channels of each group Torch-Pruning leaves, read from the network it made."""
    made = model(name)
    makers = set(prunable(made.gating.graph).names)
    layers = [
        (path, m)
        for path, m in made.network.named_modules()
        if isinstance(m, nn.Conv2d | nn.Linear)
    ]
    importance = {
        "li": tp.importance.MagnitudeImportance(p=1, group_reduction="first", normalizer=None),
        "slimming": tp.importance.BNScaleImportance(normalizer=None),
    }[criterion]
    tp.pruner.BasePruner(
        made.network,
        IMAGES,
        importance,
        global_pruning=criterion == "slimming",
        pruning_ratio=ratio,
        max_pruning_ratio=1.0,
        ignored_layers=[module for path, module in layers if path not in makers],
    ).step()
    masks = []
    for path, width in zip(
        norms_behind(made), prunable(model(name).gating.graph).widths, strict=True
    ):
        mask = torch.zeros(width, dtype=torch.bool)
        mask[made.network.get_submodule(path).bias.detach().long()] = True
        masks.append(mask)
    return tuple(masks)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("name", ["vgg16", "resnet56"])
def test_li_keeps_what_torch_pruning_keeps(name: str, ratio: float) -> None:
    expected = left_by_torch_pruning(name, "li", ratio)
    widths = tuple(int(mask.sum()) for mask in expected)
    task = task_for(model(name), widths=widths)
    assert all(0 < left < full for left, full in zip(widths, task.gating.widths, strict=True))
    for found, mask in zip(li.independent(task).masks, expected, strict=True):
        assert torch.equal(found, mask)


@pytest.mark.parametrize("ratio", [0.2, 0.5])
@pytest.mark.parametrize("name", ["vgg16", "resnet56"])
def test_slimming_keeps_what_torch_pruning_keeps(name: str, ratio: float) -> None:
    expected = left_by_torch_pruning(name, "slimming", ratio)
    widths = [int(mask.sum()) for mask in expected]
    made = model(name)
    gating = prunable(made.gating.graph)
    assert min(widths) > 1 and len({w / f for w, f in zip(widths, gating.widths, strict=True)}) > 5
    counts = torch.tensor([widths, gating.widths], dtype=torch.float64)
    left, whole = macs_of_counts(counts, cost_matrix(gating, 32)).tolist()
    # No more than a rounding error above: one channel more would not fit.
    task = task_for(made, share=left / whole * (1 + 1e-9))
    for found, mask in zip(slimming.select(task).masks, expected, strict=True):
        assert torch.equal(found, mask)


@pytest.mark.parametrize("name", ["vgg16", "resnet56"])
def test_greedy_li_counts_what_is_still_there(name: str) -> None:
    made = model(name)
    expected = left_by_torch_pruning(name, "li", 0.5)
    widths = tuple(int(mask.sum()) for mask in expected)
    task = task_for(made, widths=widths)
    masks, before = [], None
    for path, width in zip(task.gating.names, widths, strict=True):
        weight = made.network.get_submodule(path).weight.detach()
        # In a VGG a convolution reads what the one before makes; in a block, a whole stream.
        if name == "vgg16" and before is not None:
            weight = weight[:, before]
        norms = weight.double().abs().sum(dim=(1, 2, 3)).tolist()
        kept = sorted(range(len(norms)), key=norms.__getitem__)[-width:]
        before = torch.tensor([channel in kept for channel in range(len(norms))])
        masks.append(before)
    for found, mask in zip(li.greedy(task).masks, masks, strict=True):
        assert torch.equal(found, mask)
    same = all(map(torch.equal, masks, li.independent(task).masks))
    assert same == (name == "resnet56")
