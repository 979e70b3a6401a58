"""One description of a network: its layers, and which channels come and go together."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from deepmoe.errors import UserError, reason
from deepmoe.graph import functions
from deepmoe.graph.capture import capture, evaluation_mode, one_tensor
from deepmoe.graph.channels import BATCH, Call, Channels, Shapes, tensors_in
from deepmoe.graph.narrow import narrowed_skeleton
from deepmoe.progress import progress

SMALL = 64  # pixels a side: enough to tell channels apart, and quick
OTHER_SIZES = ((9, 6), (32, 64))  # more than the images that a network is captured with
LEAST_TRIED = 16  # pixels a side, of smaller images


@dataclass(frozen=True)
class Group:
    """Channels that are gated together: one gate a unit, which is a channel or several.

    A unit is more than one channel where these can't be told apart: a depthwise convolution's input
    and output, what an addition joins, a block of a grouped convolution.
    """

    number: int
    name: str  # the path of its first maker; those of one maker are told apart by a number
    width: int  # units
    makers: tuple[str, ...]  # paths of the layers that make these channels
    readers: tuple[str, ...]  # paths of the layers that read them
    is_stream: bool  # whether an addition joins what several layers make
    pinned: str | None  # why it can't be gated, if so


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution or linear layer, with the units of its channels.

    Units are counted over all groups; -1 stands for channels that belong to none.
    """

    path: str
    node: str  # of the graph
    is_conv: bool
    passes_on: bool  # grouped or depthwise: outputs are of the same units as their inputs
    weights_per_output: int
    ins: Tensor  # unit of each input channel
    outs: Tensor  # unit of each output channel


@dataclass(frozen=True, eq=False)
class Graph:
    """A network as data.

    Attributes:
        program: operations in order, of `torch.fx`.
        skeleton: the network without its weights, for shapes.
        layers: in the order in which they run.
        groups: in the order of their first makers.
        followers: for parameters and buffers that are no layer's weight, the unit of each value.
        colours: channels of the images.
        classes: number of logits.
        given_size: of the images that the network was captured with.
        tried_size: of images with which it was looked at.
        size: of images, where the network's code allows no other.
    """

    program: fx.Graph
    skeleton: nn.Module
    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    followers: dict[str, Tensor]
    colours: int
    classes: int
    given_size: tuple[int, int]
    tried_size: tuple[int, int]
    size: tuple[int, int] | None = None
    _positions: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict, repr=False)
    _other_macs: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: object) -> "Graph":
        return self  # nothing in it ever changes

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first unit of each group, and the number of all units."""
        widths = [group.width for group in self.groups]
        return tuple(sum(widths[:i]) for i in range(len(widths) + 1))

    @cached_property
    def group_of_unit(self) -> Tensor:
        """The group of each unit."""
        widths = torch.tensor([group.width for group in self.groups], dtype=torch.int64)
        return torch.arange(len(widths)).repeat_interleave(widths)

    def positions(self, size: tuple[int, int]) -> dict[str, int]:
        """For images of this size, at how many positions each layer runs, by its path."""
        if size not in self._positions:
            self.check_size(size)
            try:
                with FlopCounterMode(display=False) as counter:
                    shapes = _shapes(self.program, self.skeleton, self.colours, size)
            except Exception as error:  # of anybody's code
                side = self._least_side(min(size))
                least = f"it needs at least {side} px a side"
                why = least if side > min(size) else reason(error)
                raise UserError(
                    f"the network does not take images of {size[0]}x{size[1]} px: {why}"
                ) from error
            found = {}
            for layer in self.layers:
                shape = shapes[layer.node]
                channels = shape[1] if layer.is_conv else shape[-1]
                found[layer.path] = shape.numel() // channels // BATCH
            self._positions[size] = found
            own = (found[x.path] * x.weights_per_output * len(x.outs) for x in self.layers)
            self._other_macs[size] = counter.get_total_flops() // 2 // BATCH - sum(own)
        return self._positions[size]

    def other_macs(self, size: tuple[int, int]) -> int:
        """MACs of what is no layer here, such as attention: no gate changes them."""
        self.positions(size)
        return self._other_macs[size]

    def macs(self, size: tuple[int, int]) -> dict[str, int]:
        """MACs of each layer for an image of this size, all of whose channels run, by its path."""
        positions = self.positions(size)
        return {
            layer.path: layer.weights_per_output * len(layer.outs) * positions[layer.path]
            for layer in self.layers
        }

    def _least_side(self, small: int) -> int:
        """The least side of square images that the network takes, if this one is too small."""
        enough, too_small = max(self.tried_size), small
        if not self._takes(enough):
            return small
        while enough - too_small > 1:
            middle = (enough + too_small) // 2
            enough, too_small = (middle, too_small) if self._takes(middle) else (enough, middle)
        return enough

    def _takes(self, side: int) -> bool:
        return _takes(self.program, self.skeleton, self.colours, side)

    def check_size(self, size: tuple[int, int]) -> None:
        """Refuses images of a size that the network's code does not allow."""
        if self.size is not None and size != self.size:
            raise UserError(
                f"the network was captured for images of {self.size[0]}x{self.size[1]} px, and its "
                f"code works for no others: to use {size[0]}x{size[1]}, gate it with images of "
                "that size"
            )


def describe(module: nn.Module, images: Tensor) -> Graph:
    """Captures a network, and finds out which channels of it come and go together.

    Args:
        module: the network.
        images: such as it takes.

    Raises:
        UserError: where it can't be captured, or has nothing that could be gated.
    """
    _check_arguments(module, images)
    if any(hasattr(m, "gating") and hasattr(m, "heads") for m in module.modules()):
        raise UserError("this network is gated already")
    if not any(isinstance(m, nn.Conv2d) for m in module.modules()):
        raise UserError(f"the network {type(module).__name__} has no convolution")
    with progress("capturing the network"):
        program = capture(module, images)
        _check_weights(module, program)
        fixed = _size_is_fixed(program, module, images)
        size = images.shape[2], images.shape[3]
        return build(program, module, images.shape[1], size, fixed=fixed)


def _check_arguments(module: Any, images: Any) -> None:
    if not isinstance(module, nn.Module):
        kind = module if isinstance(module, type) else type(module)
        raise UserError(f"a network is a torch.nn.Module, not a {kind.__name__}")
    if not isinstance(images, Tensor):
        raise UserError(f"images are a tensor, such as the network takes, not {type(images)}")
    if images.dim() == 4 and not images.numel():
        raise UserError(f"images of shape {tuple(images.shape)} are empty: give at least one")


def _check_weights(module: nn.Module, program: fx.Graph) -> None:
    """Refuses parameters that serve twice: what one use of them needs, the other may not."""
    owners: dict[Tensor, str] = {}
    for path, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            if parameter in owners:
                raise UserError(
                    f"{owners[parameter]} and {path} share a parameter: "
                    "give each weights of its own"
                )
            owners[parameter] = path
    for path, part in module.named_modules():
        if isinstance(part, nn.Conv2d | nn.Linear) and not isinstance(
            dict(part.named_parameters(recurse=False)).get("weight"), nn.Parameter
        ):
            raise UserError(
                f"the weight of {path} is computed (by weight norm, spectral norm or pruning): "
                "make it a parameter first"
            )
    called: set[str] = set()
    for node in program.find_nodes(op="call_module"):
        path = str(node.target)
        if path in called and module.get_submodule(path).state_dict():
            raise UserError(f"the layer {path} is called twice: give each call weights of its own")
        called.add(path)
    for node in program.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        others = [u for u in node.users if not _is_layer(u, node) and u.target is not getattr]
        if name == "weight" and others and (path in called or len(others) < len(node.users)):
            raise UserError(f"{node.target} is also used outside of its layer: give that its own")


def _is_layer(user: fx.Node, weight: fx.Node) -> bool:
    return user.target is functions.conv2d and user.args[1] is weight


def build(
    program: fx.Graph, module: nn.Module, colours: int, size: tuple[int, int], *, fixed: bool
) -> Graph:
    """The description of a network whose operations are known.

    Args:
        program: its operations.
        module: the network.
        colours: channels of the images that it takes.
        size: of these images.
        fixed: whether it takes no others.
    """
    skeleton = without_weights(module)
    small = size
    if not fixed and min(size) > SMALL and _takes(program, skeleton, colours, SMALL):
        small = (SMALL, SMALL)
    counted: set[str] = set()
    while True:
        # Numbers are real ones, also where somebody makes networks without weights.
        with torch._C.DisableTorchFunction():
            channels = Channels(skeleton, program)
            logits = channels.run(torch.empty(BATCH, colours, *small, device="meta"))
            described = _described(channels, counted)
            graph = Graph(
                program=program,
                skeleton=skeleton,
                **described,
                colours=colours,
                classes=logits.shape[1],
                given_size=size,
                tried_size=small,
                size=size if fixed else None,
            )
            wrong = _wrong_after_removal(graph, channels)
        if wrong <= counted:
            return graph
        counted |= wrong


def without_weights(module: nn.Module) -> nn.Module:
    """A copy of the structure alone: parameters and buffers on the meta device."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(_empty_like(p), requires_grad=False) for p in module.parameters()
    }
    memo |= {id(b): _empty_like(b) for b in module.buffers()}
    return copy.deepcopy(module, memo)


def _empty_like(tensor: Tensor) -> Tensor:
    """Without values, and in single precision where it has any: as the images that are tried."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor, device="meta", dtype=dtype)


def _described(channels: Channels, counted: set[str]) -> dict[str, Any]:
    """Layers, groups and followers, from numbers that were sent through a network.

    Args:
        channels: the numbers.
        counted: paths of layers whose outputs the network's code counts.
    """
    _check_calls(channels.calls)
    for call in channels.calls:
        if call.path in counted:
            channels.pin(
                call.outs.tolist(), "has a number of channels that the network's code relies on"
            )
    ins = [channels.roots(call.ins) for call in channels.calls]
    outs = [channels.roots(call.outs) for call in channels.calls]
    groups, unit_of = _grouped(channels, ins, outs)

    def units(numbers: Tensor) -> Tensor:
        return torch.tensor([unit_of.get(n, -1) for n in numbers.tolist()], dtype=torch.int64)

    layers = tuple(
        Layer(
            path=call.path,
            node=call.node,
            is_conv=call.is_conv,
            passes_on=call.groups > 1,
            weights_per_output=call.kernel_area * len(call.ins) // call.groups,
            ins=units(i),
            outs=units(o),
        )
        for call, i, o in zip(channels.calls, ins, outs, strict=True)
    )
    followers = {
        name: units(channels.roots(numbers.flatten())).view(numbers.shape)
        for name, numbers in channels.followers.items()
    }
    return {"layers": layers, "groups": groups, "followers": followers}


def _check_calls(calls: Sequence[Call]) -> None:
    paths = [call.path for call in calls]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise UserError(f"the layer {twice[0]} is called twice: give each call weights of its own")


def _grouped(
    channels: Channels, ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> tuple[tuple[Group, ...], dict[int, int]]:
    """Groups of units that the same layers make and read, and the unit of each number."""
    uses: dict[int, dict[tuple[int, bool], int]] = defaultdict(lambda: defaultdict(int))
    for index, (of_inputs, of_outputs) in enumerate(zip(ins, outs, strict=True)):
        for number in of_inputs.tolist():
            uses[number][index, False] += 1
        for number in of_outputs.tolist():
            uses[number][index, True] += 1
    uses.pop(0, None)
    pinned = {channels.root_of(number): why for number, why in channels.pinned.items()}
    added = {channels.root_of(number) for number in channels.added}
    alike: dict[tuple, list[int]] = defaultdict(list)
    for number in sorted(uses):
        alike[(*sorted(uses[number].items()), pinned.get(number), number in added)].append(number)
    groups: list[Group] = []
    unit_of: dict[int, int] = {}
    for numbers in sorted(alike.values()):
        calls = channels.calls
        makers = [i for (i, makes) in sorted(uses[numbers[0]]) if makes and calls[i].groups == 1]
        readers = [i for (i, makes) in sorted(uses[numbers[0]]) if not makes]
        readers = [i for i in readers if calls[i].groups == 1]
        if not makers:
            continue
        unit_of |= {number: len(unit_of) + k for k, number in enumerate(numbers)}
        first = calls[makers[0]].path
        before = sum(group.makers[0] == first for group in groups)
        groups.append(
            Group(
                number=len(groups),
                name=f"{first}:{before + 1}" if before else first,
                width=len(numbers),
                makers=tuple(calls[i].path for i in makers),
                readers=tuple(calls[i].path for i in readers),
                is_stream=numbers[0] in added,
                pinned=pinned.get(numbers[0]),
            )
        )
    return tuple(groups), unit_of


def _wrong_after_removal(graph: Graph, channels: Channels) -> set[str]:
    """Layers whose outputs can't be made fewer, found by removing some of each group.

    A network's code may hold on to numbers of channels: what it splits or reshapes by them does not
    work any more, or gives something else. All groups lose some, then every second one, then every
    second pair, which shows what is split into equal parts.
    """
    # A grouped convolution of one block would be a plain one: two are left.
    passed_on = torch.cat([layer.outs for layer in graph.layers if layer.passes_on] or [_NONE])
    shared = {int(graph.group_of_unit[unit]) for unit in passed_on.tolist() if unit >= 0}
    for loses, every_other in _REMOVALS:
        keep = torch.ones(graph.offsets[-1], dtype=torch.bool)
        for group, start in zip(graph.groups, graph.offsets, strict=False):
            if group.pinned is None and loses(group.number):
                of_group = keep[start : start + group.width]
                least = 2 if group.number in shared and group.width > 2 else 1
                if every_other and group.width > 2 * least:
                    of_group[1::2] = False
                else:
                    gone = max(0, min(-(-group.width // 2), group.width - least))
                    of_group[group.width - gone :] = False
        found = _wrong_without(graph, channels, keep)
        if found:
            return found
    return set()


_NONE = torch.zeros(0, dtype=torch.int64)
# Which groups lose some, and whether these are every other one instead of the last ones.
_REMOVALS: tuple[tuple[Callable[[int], Any], bool], ...] = (
    (lambda number: True, False),
    (lambda number: number % 2, False),
    (lambda number: number // 2 % 2, False),
    (lambda number: number // 4 % 2, False),
    (lambda number: True, True),
)


def _wrong_without(graph: Graph, channels: Channels, keep: Tensor) -> set[str]:
    small = Channels(narrowed_skeleton(graph, keep), graph.program)
    try:
        small.run(torch.empty(BATCH, graph.colours, *graph.tried_size, device="meta"))
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


def _size_is_fixed(program: fx.Graph, module: nn.Module, images: Tensor) -> bool:
    """Whether the captured code gives something else for images of another size."""
    if images.is_meta:
        return False
    (placeholder,) = program.find_nodes(op="placeholder")
    bounds = placeholder.meta.get("bounds", ((1, math.inf), (1, math.inf)))
    if any(upper < math.inf for _, upper in bounds):
        return True
    captured = fx.GraphModule(module, program)
    height, width = images.shape[-2:]
    others = [(height + more, width + wider) for more, wider in OTHER_SIZES]
    tried = False
    with evaluation_mode(module), torch.no_grad():
        for size in others:
            same = _gives_the_same(captured, module, images, size)
            if same is not None:
                tried = True
                if not same:
                    return True
                break
        # Below what an export takes for granted, a branch may be another one.
        below = (bounds[0][0] - 1, bounds[1][0] - 1)
        smaller = [(below[0], width), (height, below[1])]
        for size, least in zip(smaller, below, strict=True):
            if least >= LEAST_TRIED and _gives_the_same(captured, module, images, size) is False:
                return True
    return not tried


def _gives_the_same(
    captured: nn.Module, module: nn.Module, images: Tensor, size: tuple[int, int]
) -> bool | None:
    """Whether two networks agree on images of a size; `None` where the original takes none."""
    shape = (1, images.shape[1], *size)
    other = torch.randn(shape, device=images.device, dtype=images.dtype)
    try:
        expected = one_tensor(module(other))
    except Exception:  # of anybody's code: it may not take any size
        return None
    try:
        found = captured(other)
    except Exception:
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def _takes(program: fx.Graph, skeleton: nn.Module, colours: int, side: int) -> bool:
    """Whether a network runs on square images of this side."""
    try:
        _shapes(program, skeleton, colours, (side, side))
    except Exception:  # of anybody's code
        return False
    return True


def _shapes(
    program: fx.Graph, skeleton: nn.Module, colours: int, size: tuple[int, int]
) -> dict[str, torch.Size]:
    """The shape of each node's value, for a batch of images of this size."""
    shapes = Shapes(skeleton, program)
    shapes.run(torch.empty(BATCH, colours, *size, device="meta"))
    return {n.name: value.shape for n, value in shapes.env.items() if isinstance(value, Tensor)}
