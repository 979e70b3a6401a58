"""The same network with fewer channels, or with copies of some."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from deepmoe.graph.graph import Graph


@torch.no_grad()
def narrowed(graph: "Graph", module: nn.Module, keep: Tensor) -> nn.Module:
    """A copy of the network without some of its channels.

    Args:
        graph: of the network.
        module: the network, with its weights.
        keep: for each unit, whether it stays. A group always keeps one; where none was to stay,
            nothing reads it.

    Returns:
        A network of the same class whose own forward works: what its code counts was pinned.
    """
    keep, unread = with_one_of_each(graph, keep.cpu())
    small = resized(graph, module, lambda units: _kept(units, keep))
    for layer in graph.layers:
        silent = torch.isin(layer.ins[_kept(layer.ins, keep)], unread)
        if not layer.passes_on and bool(silent.any()):
            weight = small.get_submodule(layer.path).weight
            assert isinstance(weight, Tensor)
            weight[:, silent.to(weight.device)] = 0
    return small


@torch.no_grad()
def narrowed_skeleton(graph: "Graph", keep: Tensor) -> nn.Module:
    """As `narrowed`, without weights and quick: it shares with the skeleton all but shapes."""
    keep, _ = with_one_of_each(graph, keep)
    return resized(graph, graph.skeleton, lambda units: _kept(units, keep), _twin)


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    return copy.deepcopy(module, memo)


def _twin(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy with tensors of its own, which shares everything else with its original."""
    if id(module) not in memo:
        memo[id(module)] = twin = copy.copy(module)
        for kind in ("_parameters", "_buffers"):
            tensors = getattr(module, kind).items()
            setattr(twin, kind, {name: memo.get(id(tensor)) for name, tensor in tensors})
        children = module._modules.items()
        twin._modules = {n: None if m is None else _twin(m, memo) for n, m in children}
    return memo[id(module)]


@torch.no_grad()
def resized(
    graph: "Graph",
    module: nn.Module,
    places: Callable[[Tensor], Tensor],
    copied: Callable[[nn.Module, dict[int, Any]], nn.Module] = _deep_copy,
) -> nn.Module:
    """A copy of the network with other channels.

    Args:
        graph: of the network.
        module: the network, with its weights.
        places: from the units of some channels to the channels that take their place.
        copied: from a module, and its new tensors by the identity of the old ones, to the copy.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    changed: dict[str, Tensor] = {}
    for layer in graph.layers:
        weight = tensors[f"{layer.path}.weight"].detach()
        if not layer.passes_on:
            weight = _taken(weight, 1, places(layer.ins))
        changed[f"{layer.path}.weight"] = _taken(weight, 0, places(layer.outs))
    for name, units in graph.followers.items():
        if tensors.get(name) is not None:
            changed[name] = _of_units(tensors[name].detach(), units, places)
    memo: dict[int, Any] = {}
    for name, tensor in tensors.items():
        value = changed.get(name, tensor.detach().clone())
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = value
    made = copied(module, memo)
    for layer in graph.layers:
        _tell_sizes(made.get_submodule(layer.path))
    for part in made.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None:
            part.num_features = len(part.running_mean)
    return made


def narrowed_graph(graph: "Graph", keep: Tensor) -> "Graph":
    """The description of the network that `narrowed` makes."""
    keep, _ = with_one_of_each(graph, keep.cpu())
    renumbered = torch.where(keep, keep.cumsum(0) - 1, -1)

    def units(old: Tensor) -> Tensor:
        kept = old[_kept(old, keep)]
        return torch.where(kept < 0, -1, renumbered[kept])

    left = torch.zeros(len(graph.groups), dtype=torch.int64)
    left.index_add_(0, graph.group_of_unit, keep.long())
    layers = []
    for layer in graph.layers:
        ins, outs = units(layer.ins), units(layer.outs)
        per_output = layer.weights_per_output
        if not layer.passes_on:
            per_output = per_output * len(ins) // len(layer.ins)
        layers.append(replace(layer, ins=ins, outs=outs, weights_per_output=per_output))
    followers = {}
    for name, old in graph.followers.items():
        kept = _of_units(old, old, lambda units: _kept(units, keep))
        followers[name] = torch.where(kept < 0, -1, renumbered[kept])
    return replace(
        graph,
        skeleton=narrowed_skeleton(graph, keep),
        layers=tuple(layers),
        groups=tuple(replace(g, width=int(left[g.number])) for g in graph.groups),
        followers=followers,
        _positions={},
        _other_macs={},
    )


def with_one_of_each(graph: "Graph", keep: Tensor) -> tuple[Tensor, Tensor]:
    """Units to keep, at least one a group, and those kept for that alone."""
    counts = torch.zeros(len(graph.groups), dtype=torch.int64)
    counts.index_add_(0, graph.group_of_unit, keep.long())
    starts = torch.tensor(graph.offsets[:-1], dtype=torch.int64)
    unread = starts[counts == 0]
    keep = keep.clone()
    keep[unread] = True
    return keep, unread


def _kept(units: Tensor, keep: Tensor) -> Tensor:
    return ((units < 0) | keep[units]).nonzero().flatten()


def _taken(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    if torch.equal(index, torch.arange(tensor.shape[dim])):
        return tensor.clone()
    return tensor.index_select(dim, index.to(tensor.device))


def _of_units(tensor: Tensor, units: Tensor, places: Callable[[Tensor], Tensor]) -> Tensor:
    """Values of the channels that take others' place, whichever dimension these lie along."""
    for dim in range(tensor.dim()):
        line = units.movedim(dim, 0).reshape(units.shape[dim], -1)
        if units.shape[dim] > 1 and bool((line == line[:, :1]).all()):
            return _taken(tensor, dim, places(line[:, 0]))
    return tensor.clone()


def _tell_sizes(module: nn.Module) -> None:
    """Brings what a module says of itself in line with its weight."""
    assert isinstance(module.weight, Tensor)
    outputs, inputs = module.weight.shape[:2]
    if isinstance(module, nn.Conv2d):
        if module.groups > 1:
            module.groups = module.groups * outputs // module.out_channels
        module.in_channels, module.out_channels = inputs * module.groups, outputs
    elif isinstance(module, nn.Linear):
        module.in_features, module.out_features = inputs, outputs
