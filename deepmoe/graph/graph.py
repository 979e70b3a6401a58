"""One description of a network: its layers, and which channels come and go together."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from deepmoe.errors import UserError, reason
from deepmoe.graph.image_sizes import shapes_of, takes
from deepmoe.graph.shapes import BATCH


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
                    shapes = shapes_of(self.program, self.skeleton, self.colours, size)
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
        return takes(self.program, self.skeleton, self.colours, side)

    def check_size(self, size: tuple[int, int]) -> None:
        """Refuses images of a size that the network's code does not allow."""
        if self.size is not None and size != self.size:
            raise UserError(
                f"the network was captured for images of {self.size[0]}x{self.size[1]} px, and its "
                f"code works for no others: to use {size[0]}x{size[1]}, gate it with images of "
                "that size"
            )
