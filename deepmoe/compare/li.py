"""Pruning Filters for Efficient ConvNets (Li et al. 2017): filters of small L1 norm go.

A channel's score is the sum of |weight| over the filter that makes it. Every layer loses the same
share, or as many as are given. *Independent* sums over all inputs; *greedy* goes from the first
layer to the last, and leaves out inputs that are gone already.
"""

import torch
from torch import Tensor

from deepmoe.compare.task import Choice, PruningTask, keep_strongest, unit_sums
from deepmoe.compare.widths import strongest


def independent(task: PruningTask) -> Choice:
    """The filters of smallest norm go, all layers at once."""
    return keep_strongest(task.by_unit(_filter_norms(task)), task.even_widths())


def greedy(task: PruningTask) -> Choice:
    """The same from the first layer to the last; what is gone no longer counts."""
    widths, keep = task.even_widths(), torch.ones(len(unit_sums(task)), dtype=torch.bool)
    masks: list[Tensor] = []
    for index, group in enumerate(task.groups):
        scores = task.by_unit(_filter_norms(task, keep))[index]
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
