"""Which channels belong together: numbers are sent through a network in place of values.

Every channel that a layer makes gets a number of its own. Operations that move values move the
numbers as they are; those that work value by value unite the numbers that meet; a depthwise
convolution passes them on, a grouped one unites those of a block. Whatever else there is pins the
channels that reach it, with a reason: they stay as they are, ungated.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from deepmoe.errors import UserError
from deepmoe.graph import functions
from deepmoe.graph.channel_numbers import (
    NOTHING,
    compact,
    distinct_pairs,
    expanded,
    has_tensor,
    nothing_like,
    shrunk,
    tensors_in,
)
from deepmoe.graph.operations import (
    ADDITIONS,
    LAYERS,
    MIXING,
    MOVING,
    NORMS,
    PADDING,
    PAIRWISE,
    POINTWISE,
    REDUCING,
    SPATIAL,
    takes_dtype,
)
from deepmoe.graph.shapes import BATCH, Shapes


@dataclass(frozen=True)
class Call:
    """A layer as it is called in the graph."""

    node: str  # its name
    path: str  # of the module that owns the weight
    is_conv: bool
    ins: Tensor  # number of each input channel
    outs: Tensor  # number of each output channel
    groups: int  # of one that is grouped or depthwise: outputs have their inputs' numbers
    kernel_area: int


class Channels(Shapes):
    """Runs a graph for its shapes, with numbers of channels beside the shapes.

    Attributes after `run`:
        calls: of layers, in order.
        followers: for names of parameters and buffers, a number for each of their values.
        pinned: reasons by number.
        added: numbers that met in an addition.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph)
        self.parents = [NOTHING]
        self._table: Tensor | None = None  # of all roots, until something changes
        self.labels: dict[fx.Node, Any] = {}
        self.calls: list[Call] = []
        self.followers: dict[str, Tensor] = {}
        self.pinned: dict[int, str] = {}
        self.added: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.labels[n] = self._labels(n, value)
        return value

    # What numbers are equal.

    def fresh(self, count: int) -> Tensor:
        """Numbers that nothing has yet."""
        start = len(self.parents)
        self.parents.extend(range(start, start + count))
        self._table = None
        return torch.arange(start, start + count)

    def root_of(self, number: int) -> int:
        """What stands for all numbers that are united with this one."""
        while self.parents[number] != number:
            self.parents[number] = self.parents[self.parents[number]]
            number = self.parents[number]
        return number

    def roots(self, numbers: Tensor) -> Tensor:
        """The same for many."""
        if self._table is None:
            table = torch.tensor(self.parents)
            while not torch.equal(further := table[table], table):
                table = further
            self._table = table
        return self._table[numbers]

    def unite(self, one: int, other: int) -> None:
        """Makes two numbers stand for channels that come and go together."""
        one, other = sorted((self.root_of(one), self.root_of(other)))
        if one == NOTHING:
            self.pin([other], "meets values that no layer has made")
        elif one != other:
            self.parents[other] = one
            self._table = None

    def pin(self, numbers: Iterable[int], reason: str) -> None:
        """Keeps channels as they are."""
        for number in numbers:
            if number != NOTHING:
                self.pinned.setdefault(number, reason)

    # What operations do to numbers.

    def _labels(self, node: fx.Node, value: Any) -> Any:
        if node.op == "output":
            self._pin_all(node, "is the network's output")
            return None
        if not node.op.startswith("call"):
            return nothing_like(value)
        name = self.names[node]
        weight = self._weight_of(node, name)
        if weight is not None:
            return self._layer(node, *weight, value)
        if name in NORMS:
            return self._norm(node, value)
        if name in POINTWISE:
            if any(has_tensor(self.labels.get(n)) for n in node.all_input_nodes[1:]):
                self._pin_all(node, f"meets other channels in {name}")
            return self._labels_of(node.args[0])
        if name in PAIRWISE:
            return self._pair(node, name, value)
        if name == "prelu":
            return self._prelu(node, value)
        if name == "instancenorm2d" and self._has_no_parameters(node):
            return self._spatial(node, name, value)
        if name in SPATIAL or _pads_positions(node, name) or name in REDUCING:
            return self._spatial(node, name, value)
        if name in MOVING:
            return self._move(node, value)
        if has_tensor(value):
            why = "mixes channels" if name in MIXING else "is not understood"
            self._pin_all(node, f"reaches {name}, which {why}")
        return nothing_like(value)

    def _has_no_parameters(self, node: fx.Node) -> bool:
        module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        return module is not None and not module.state_dict()

    def _labels_of(self, argument: Any) -> Any:
        return self.labels[argument] if isinstance(argument, fx.Node) else None

    def _weight_of(self, node: fx.Node, name: str) -> tuple[str, bool] | None:
        """Path of the layer's module and whether it is a convolution; `None` for other nodes."""
        if name not in LAYERS:
            return None
        if node.op == "call_module":
            return str(node.target), name == "conv2d"
        weight = node.args[1]
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            return None  # made by the network itself
        return str(weight.target).rpartition(".")[0], name == "conv2d"

    def _layer(self, node: fx.Node, path: str, is_conv: bool, value: Tensor) -> Tensor:
        module = self.root.get_submodule(path)
        weight, dim = module.weight, 1 if is_conv else -1
        assert isinstance(weight, Tensor)
        ins = self._by_channel(node, self._labels_of(node.args[0]), dim)
        if len(value) != BATCH:
            self.pin(ins.tolist(), f"is read by {path}, which does not see image by image")
        groups = len(ins) // weight.shape[1]
        per_group = len(weight) // groups
        if groups == 1:
            outs = self.fresh(len(weight))
        else:
            blocks = ins.view(groups, -1)
            for block in blocks.tolist():
                for other in block[1:]:
                    self.unite(block[0], other)
            outs = blocks[:, :1].expand(-1, per_group).flatten()
        self.followers[f"{path}.bias"] = outs
        area = weight.shape[2] * weight.shape[3] if is_conv else 1
        self.calls.append(Call(node.name, path, is_conv, ins, outs, groups, area))
        return expanded(outs, dim, value)

    def _norm(self, node: fx.Node, value: Tensor) -> Tensor:
        path = node.target if node.op == "call_module" else None
        if node.target is functions.batch_norm:
            path = node.args[1].target  # type: ignore[union-attr]
        numbers = self._by_channel(node, self._labels_of(node.args[0]), 1)
        norm: Any = self.root.get_submodule(str(path))
        if norm.running_mean is None:
            raise UserError(
                f"the norm {path} depends on the whole batch in evaluation too, so the gates of "
                "one image would change the others: give it track_running_stats=True"
            )
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.followers[f"{path}.{name}"] = numbers
        return expanded(numbers, 1, value)

    def _prelu(self, node: fx.Node, value: Tensor) -> Tensor:
        numbers = self._by_channel(node, self._labels_of(node.args[0]), 1)
        slopes = node.args[1]
        if not isinstance(slopes, fx.Node) or slopes.op != "get_attr":
            self._pin_all(node, "reaches a PReLU whose slopes are no parameter")
        elif self.fetch_attr(str(slopes.target)).numel() > 1:
            self.followers[str(slopes.target)] = numbers
        return expanded(numbers, 1, value)

    def _pair(self, node: fx.Node, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        sides = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        tensors = [a for a in sides if isinstance(self.labels.get(a), Tensor)]
        for side in tensors:
            if side.op == "get_attr":
                return self._follow(node, side, [t for t in tensors if t is not side], value)
        if len(tensors) < 2 or tensors[0] is tensors[1]:
            return self.labels[tensors[0]].expand(value.shape) if tensors else nothing_like(value)
        labels = [compact(self.labels[t]) for t in tensors]
        wide = self._used_for_many(labels, name)
        if wide is not None:
            return wide.expand(value.shape)
        left, right = torch.broadcast_tensors(*labels)
        pairs = distinct_pairs(left, right)
        for one, other in pairs[(pairs != NOTHING).all(dim=1)].tolist():
            if name in ADDITIONS and self.root_of(one) != self.root_of(other):
                self.added.add(one)
            self.unite(one, other)
        return torch.where(left != NOTHING, left, right).expand(value.shape)

    def _used_for_many(self, labels: list[Tensor], name: str) -> Tensor | None:
        """Pins a side of which single channels meet many of the other, such as a mask's only one.

        Returns:
            The other side's numbers; `None` where channels meet one by one.
        """
        for few, many in (labels, labels[::-1]):
            if few.dim() > many.dim():
                continue
            shape = (1,) * (many.dim() - few.dim()) + tuple(few.shape)
            sides = zip(shape, many.shape, strict=True)
            spread = many.dim() > 1 and any(s == 1 < m for s, m in sides)
            one_of_many = few.numel() == 1 and bool((few != NOTHING).any())
            if spread and one_of_many and len(many.unique()) > 1:
                self.pin(few.unique().tolist(), f"is used for all channels by {name}")
                return many
        return None

    def _follow(self, node: fx.Node, parameter: fx.Node, others: list[fx.Node], value: Any) -> Any:
        """A parameter that meets channels one by one has their numbers."""
        if not others:
            return nothing_like(value)
        labels = compact(self.labels[others[0]])
        own = self.fetch_attr(str(parameter.target))
        index = torch.arange(own.numel()).view(own.shape)
        left, right = torch.broadcast_tensors(index, labels)
        pairs = distinct_pairs(left, right)
        if len(pairs) == own.numel():  # each value meets one channel
            self.followers[str(parameter.target)] = pairs[:, 1].view(own.shape)
        elif own.numel() > 1 and len(pairs[:, 0].unique()) > 1:
            varies = pairs[:, 1].unique()
            if len(varies) > 1:
                self.pin(varies.tolist(), f"meets the parameter {parameter.target}")
        return labels.expand(value.shape)

    def _spatial(self, node: fx.Node, name: str, value: Tensor) -> Tensor:
        labels = self._labels_of(node.args[0])
        if not isinstance(labels, Tensor):
            return nothing_like(value)
        if name not in REDUCING:
            return expanded(self._by_channel(node, labels, 1), 1, value)
        dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        every = range(labels.dim()) if dims is None else dims
        if 0 in [d % labels.dim() for d in (every if isinstance(every, Iterable) else [every])]:
            raise UserError(
                f"the network mixes the images of a batch ({node.name}), so the gates of one "
                "would change the others"
            )
        if dims is None:
            self._pin_all(node, f"is summed up by {name}")
            return nothing_like(value)
        low, high = (f(labels, dims, keepdim=bool(keep)) for f in (torch.amin, torch.amax))
        if not torch.equal(low, high):
            self._pin_all(node, f"is summed up by {name}")
            return nothing_like(value)
        return shrunk(low)

    def _move(self, node: fx.Node, value: Any) -> Any:
        if not has_tensor(value):
            return nothing_like(value)

        def number_of(argument: fx.Node) -> Any:
            labels = self.labels[argument]
            return labels if has_tensor(labels) else self.env[argument]

        if self.names[node] in PADDING:  # what is added belongs to no layer
            return self._padded(node, value)
        if any(isinstance(self.labels.get(n), Tensor) for n in _indices(node)):
            self._pin_all(node, "reaches an index of numbers that a tensor holds")
            return nothing_like(value)
        if takes_dtype(node):
            self._pin_all(node, "reaches a view as numbers of another kind")
            return nothing_like(value)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), number_of)
        moved = self._call(node, args, kwargs)
        if isinstance(moved, Tensor):
            return shrunk(moved)
        return type(moved)(shrunk(m) for m in moved)

    def _padded(self, node: fx.Node, value: Tensor) -> Tensor:
        amounts: Any = node.args[1] if len(node.args) > 1 else node.kwargs["pad"]
        labels = self._labels_of(node.args[0])
        return shrunk(F.pad(labels, tuple(amounts), value=NOTHING)).expand(value.shape)

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _by_channel(self, node: fx.Node, labels: Any, dim: int) -> Tensor:
        """The number of each channel; where positions differ in it, they are pinned."""
        small = compact(labels).movedim(dim, 0)
        numbers = small.reshape(len(small), -1)
        if not bool((numbers == numbers[:, :1]).all()):
            self.pin(numbers.unique().tolist(), f"is mixed with positions before {node.name}")
            return torch.full((labels.shape[dim],), NOTHING)
        return numbers[:, 0].expand(labels.shape[dim]).clone()

    def _pin_all(self, node: fx.Node, reason: str) -> None:
        for source in node.all_input_nodes:
            for labels in tensors_in(self.labels.get(source)):
                self.pin(compact(labels).unique().tolist(), reason)


def _indices(node: fx.Node) -> list[fx.Node]:
    """Nodes that choose from another one by its numbers, as in x[:, numbers]."""
    if node.target is not operator.getitem:
        return []
    chosen = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return [part for part in chosen if isinstance(part, fx.Node)]


def _pads_positions(node: fx.Node, name: str) -> bool:
    """Whether an operation adds positions to each channel, and no channels."""
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    return name in PADDING and isinstance(amounts, list | tuple) and len(amounts) <= 4
