"""Pruning Filters for Efficient ConvNets (Li et al. 2017): filters of small L1 norm go.

A channel's score is the sum of |weight| over the filter that makes it. Every layer loses the same
share, or as many as are given. *Independent* sums over all inputs; *greedy* goes from the first
layer to the last, and leaves out inputs that are gone already.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepmoe.compare.method import pruned
from deepmoe.compare.task import Choice, PruningTask, keep_strongest, unit_sums
from deepmoe.compare.widths import Widths, strongest
from deepmoe.errors import UserError
from deepmoe.graph import Gating


def independent(task: PruningTask) -> Choice:
    """The filters of smallest norm go, all layers at once."""
    return keep_strongest(task.gating.by_group(_filter_norms(task)), task.even_widths())


def greedy(task: PruningTask) -> Choice:
    """The same from the first layer to the last; what is gone no longer counts."""
    widths, keep = task.even_widths(), torch.ones(len(unit_sums(task)), dtype=torch.bool)
    masks: list[Tensor] = []
    for index, group in enumerate(task.groups):
        scores = task.gating.by_group(_filter_norms(task, keep))[index]
        masks += strongest([scores], [widths[index]])
        start = task.gating.graph.offsets[group.number]
        keep[start : start + group.width] = masks[-1]
    return Choice(tuple(masks))


@torch.no_grad()
def _filter_norms(task: PruningTask, keep: Tensor | None = None) -> Tensor:
    """For each unit, the L1 norm of the filters that make it, over the inputs that are kept."""
    norms = unit_sums(task)
    for layer in task.gating.graph.layers:
        if layer.passes_on:
            continue
        weight = task.model.network.get_submodule(layer.path).weight
        assert isinstance(weight, Tensor)
        by_input = weight.detach().abs().double().reshape(*weight.shape[:2], -1).sum(dim=2).cpu()
        if keep is not None:
            by_input = by_input * keep[layer.ins]
        norms.index_add_(0, layer.outs % len(norms), by_input.sum(dim=1))
    return norms


SCHEDULE = {
    "train.epochs": 40,
    "train.finetune_epochs": 0,
    "train.schedule": "constant",
    "train.lr": 1e-3,
}
INDEPENDENT = pruned("li", "Li, L1 filter norms", "Li et al. 2017", independent, published=SCHEDULE)
GREEDY = pruned("li-greedy", "Li, greedy", "Li et al. 2017", greedy, published=SCHEDULE)


class Setting(NamedTuple):
    """A network of the paper: the share that each layer loses, by the layer's number.

    In a residual network, layers are the 3x3 convolutions, the stem being 1; of a block, only the
    first loses filters.
    """

    model: str
    loses: Callable[[int], float]


def _by_stage(shares: tuple[float, ...], ends: tuple[int, ...], but: set[int]) -> Callable:
    def loses(layer: int) -> float:
        stage = next(i for i, end in enumerate(ends) if layer <= end)
        return 0.0 if layer in but else shares[stage]

    return loses


SETTINGS = {
    "vgg16-a": Setting("vgg16", lambda layer: 0.5 if layer == 1 or layer >= 8 else 0.0),
    "resnet56-a": Setting("resnet56", _by_stage((0.1,), (55,), {16, 20, 38, 54})),
    "resnet56-b": Setting(
        "resnet56", _by_stage((0.6, 0.3, 0.1), (19, 37, 55), {16, 18, 20, 34, 38, 54})
    ),
    "resnet110-a": Setting("resnet110", _by_stage((0.5, 0.0), (37, 109), {36})),
    "resnet110-b": Setting("resnet110", _by_stage((0.5, 0.4, 0.3), (37, 73, 109), {36, 38, 74})),
    "resnet34-b": Setting(
        "resnet34",
        _by_stage((0.5, 0.6, 0.4, 0.0), (7, 15, 27, 33), {2, 8, 14, 16, 26, 28, 30, 32}),
    ),
}


def published_widths(name: str, model: str, gating: Gating) -> Widths:
    """What a setting of the paper leaves of each group.

    Args:
        name: one of `SETTINGS`.
        model: what the network is called.
        gating: covers its groups that can lose channels.
    """
    if name not in SETTINGS:
        raise UserError(f"no setting of Li is named {name!r}; there are {', '.join(SETTINGS)}")
    setting = SETTINGS[name]
    if model != setting.model:
        raise UserError(f"{name} is a setting of {setting.model}, not of {model}")
    groups = [gating.graph.groups[number] for number in gating.gated]
    first, step = (1, 1) if model == "vgg16" else (2, 2)
    widths, layer = [], first
    for group in groups:
        lost = 0.0 if group.is_stream else setting.loses(layer)
        layer += 0 if group.is_stream else step
        # As many as are left of the paper's counts: a part of a filter is none.
        widths.append(max(1, int(group.width * (1 - lost) + 1e-9)))
    return tuple(widths)
