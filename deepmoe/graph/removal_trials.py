"""Whether a network still works without some of its channels, tried out on numbers."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, fx

from deepmoe.graph.channel_numbers import tensors_in
from deepmoe.graph.channels import Channels
from deepmoe.graph.graph import Graph
from deepmoe.graph.narrow import narrowed_skeleton
from deepmoe.graph.shapes import blank

_NONE = torch.zeros(0, dtype=torch.int64)
Removed = Literal["last half", "every other", "last"]
# Which groups lose some, and which ones.
_REMOVALS: tuple[tuple[Callable[[int], Any], Removed], ...] = (
    (lambda number: True, "last half"),
    (lambda number: number % 2, "last half"),
    (lambda number: number // 2 % 2, "last half"),
    (lambda number: number // 4 % 2, "last half"),
    (lambda number: True, "every other"),
    (lambda number: True, "last"),  # what is reshaped by a number that halves divide, too
)


def wrong_after_removal(graph: Graph, channels: Channels) -> set[str]:
    """Layers whose outputs can't be made fewer, found by removing some of each group.

    A network's code may hold on to numbers of channels: what it splits or reshapes by them does not
    work any more, or gives something else. All groups lose some, then every second one, then every
    second pair, which shows what is split into equal parts.
    """
    # A grouped convolution of one block would be a plain one: two are left.
    passed_on = torch.cat([layer.outs for layer in graph.layers if layer.passes_on] or [_NONE])
    shared = {int(graph.group_of_unit[unit]) for unit in passed_on.tolist() if unit >= 0}
    for loses, removed in _REMOVALS:
        keep = torch.ones(graph.offsets[-1], dtype=torch.bool)
        for group, start in zip(graph.groups, graph.offsets, strict=False):
            if group.pinned is None and loses(group.number):
                of_group = keep[start : start + group.width]
                least = 2 if group.number in shared and group.width > 2 else 1
                if removed == "every other" and group.width > 2 * least:
                    of_group[1::2] = False
                else:
                    wanted = 1 if removed == "last" else -(-group.width // 2)
                    gone = max(0, min(wanted, group.width - least))
                    of_group[group.width - gone :] = False
        found = _wrong_without(graph, channels, keep)
        if found:
            return found
    return set()


def _wrong_without(graph: Graph, channels: Channels, keep: Tensor) -> set[str]:
    small = Channels(narrowed_skeleton(graph, keep), graph.program)
    try:
        small.run(blank(graph.colours, graph.tried_size))
    except Exception:  # of anybody's code
        return _makers_before(channels, next(n for n in graph.program.nodes if n not in small.env))
    renamed = torch.full((graph.offsets[-1] + 1,), -1)  # numbers of the small network, by unit
    for layer, call in zip(graph.layers, small.calls, strict=True):
        for units, numbers in ((layer.ins, call.ins), (layer.outs, call.outs)):
            left, found = units[(units < 0) | keep[units]], small.roots(numbers)
            same = len(left) == len(found)
            if same:
                of_unit, known = found[left >= 0], renamed[left[left >= 0]]
                renamed[left[left >= 0]] = of_unit
                same = bool(((known < 0) | (known == of_unit)).all())
                same = same and torch.equal(renamed[left[left >= 0]], of_unit)
            if not same:
                node = next(n for n in graph.program.nodes if n.name == layer.node)
                made = {layer.path} if units is layer.outs else set()
                return made | _makers_before(channels, node)
    return set()


def _makers_before(channels: Channels, node: fx.Node) -> set[str]:
    """Layers whose outputs a node reads, whatever lies between."""
    read: set[int] = set()
    for source in node.all_input_nodes:
        for labels in tensors_in(channels.labels.get(source)):
            read |= set(channels.roots(labels.unique()).tolist())
    return {call.path for call in channels.calls if read & set(channels.roots(call.outs).tolist())}
