"""DepGraph (Fang et al. 2023): the norm of all weights that come and go with a channel.

Scores are Torch-Pruning's, for the channels of the layer that makes a group: squared weights of
all layers that make or read them, relative to the group's mean. One threshold for all groups
decides. Only how many go, and their removal, is ours.
"""

import copy
import operator
from typing import Any

import torch
from torch import Tensor, nn

from deepmoe.compare.method import Cell, Method, Step, pruned_config
from deepmoe.compare.task import Choice, PruningTask, keep_strongest
from deepmoe.costs import as_pair
from deepmoe.errors import UserError, reason
from deepmoe.extras import require
from deepmoe.graph import Group


def select(task: PruningTask) -> Choice:
    """The channels stay whose weights, wherever they lie, have the largest norm."""
    scores = group_norms(task)
    return keep_strongest(scores, task.widths_by_threshold(scores))


def group_norms(task: PruningTask) -> list[Tensor]:
    """For each group, Torch-Pruning's score of its channels; zeros for groups that keep all.

    Raises:
        UserError: for a network that it can't follow.
    """
    require("compare", "torch_pruning")
    import torch_pruning as tp

    network = copy.deepcopy(task.model.network).eval()  # it runs and marks the network it looks at
    example = task.model.as_input(torch.zeros(1, task.gating.graph.colours, *as_pair(task.size)))
    kept = task.fixed if task.widths is None else map(operator.eq, task.widths, task.gating.widths)
    try:
        with torch.enable_grad():  # it follows the way of gradients
            graph = tp.DependencyGraph().build_dependency(network, example, verbose=False)
        return [
            torch.zeros(group.width) if keeps_all else _scores(task, network, graph, group)
            for group, keeps_all in zip(task.groups, kept, strict=True)
        ]
    except Exception as error:  # of anybody's code
        raise UserError(f"Torch-Pruning can't follow this network: {reason(error)}") from error


def _scores(task: PruningTask, network: nn.Module, dependencies: Any, group: Group) -> Tensor:
    import torch_pruning as tp

    graph = task.gating.graph
    maker = next(layer for layer in graph.layers if layer.path == group.makers[0])
    prune = tp.prune_conv_out_channels if maker.is_conv else tp.prune_linear_out_channels
    number = maker.outs - graph.offsets[group.number]
    mine = ((number >= 0) & (number < group.width)).nonzero().flatten()
    found = dependencies.get_pruning_group(
        network.get_submodule(maker.path), prune, idxs=mine.tolist()
    )
    scores = tp.importance.GroupMagnitudeImportance(p=2)(found).double().cpu()
    return torch.zeros(group.width).double().index_add_(0, number[mine], scores)


def plan(cell: Cell) -> list[Step]:
    """One run; that Torch-Pruning is missing is told before anything is trained."""
    require("compare", "torch_pruning")
    return [Step(cell.name, pruned_config(cell, "depgraph"))]


METHOD = Method("depgraph", "DepGraph, group norms", "Fang et al. 2023", plan, select)
