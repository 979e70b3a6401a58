"""From a network to its description: layers, and groups of channels that come and go together."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from deepmoe.errors import UserError, reason
from deepmoe.graph.capture import capture
from deepmoe.graph.channels import Channels
from deepmoe.graph.graph import Graph, Group, Layer
from deepmoe.graph.image_sizes import size_is_fixed, takes
from deepmoe.graph.network_checks import check_arguments, check_calls, check_weights
from deepmoe.graph.removal_trials import wrong_after_removal
from deepmoe.graph.shapes import blank
from deepmoe.progress import progress

SMALL = 64  # pixels a side: enough to tell channels apart, and quick


def describe(module: nn.Module, images: Tensor) -> Graph:
    """Captures a network, and finds out which channels of it come and go together.

    Args:
        module: the network.
        images: such as it takes.

    Raises:
        UserError: where it can't be captured, or has nothing that could be gated.
    """
    check_arguments(module, images)
    if any(hasattr(m, "gating") and hasattr(m, "heads") for m in module.modules()):
        raise UserError("this network is gated already")
    if not any(isinstance(m, nn.Conv2d) for m in module.modules()):
        raise UserError(f"the network {type(module).__name__} has no convolution")
    with progress("capturing the network"):
        program = capture(module, images)
        check_weights(module, program)
        fixed = size_is_fixed(program, module, images)
        size = images.shape[2], images.shape[3]
        return build(program, module, images.shape[1], size, fixed=fixed)


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
    if not fixed and min(size) > SMALL and takes(program, skeleton, colours, SMALL):
        small = (SMALL, SMALL)
    counted: set[str] = set()
    while True:
        # Numbers are real ones, also where somebody makes networks without weights.
        with torch._C.DisableTorchFunction():
            channels = Channels(skeleton, program)
            logits = _followed(channels, colours, small)
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
            wrong = wrong_after_removal(graph, channels)
        if wrong <= counted:
            return graph
        counted |= wrong


def _followed(channels: Channels, colours: int, size: tuple[int, int]) -> Tensor:
    """Numbers of channels sent through a network, whose images have shapes, but no values."""
    try:
        return channels.run(blank(colours, size))
    except UserError:
        raise
    except Exception as error:  # of anybody's code
        raise UserError(
            f"the network can't be followed without the values of its images ({reason(error, 200)})"
            ": its code may ask for them, or hold a tensor that is neither parameter nor buffer"
        ) from error


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
    check_calls(channels.calls)
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
