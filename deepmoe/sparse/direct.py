"""A convolution of one image that reads weights where they lie, of active channels alone.

Vectors run over positions, so that a weight is a single number: which outputs and inputs it belongs
to does not matter, and nothing has to be collected.
"""

import math
from collections.abc import Hashable, Iterator
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.threads import run_on_threads

if TYPE_CHECKING:
    from deepmoe.sparse.direct_kernel import Tile

FEWEST_POSITIONS = 8  # with fewer, most of a vector would be in vain
LARGEST_VECTOR = 16  # floats
MOST_TAPS = 9  # the code holds every tap
CACHE = 2**19  # bytes that stay in a core's own cache
MINUS_INFINITY, ZERO = (int(np.float32(f).view(np.uint32)) for f in (-np.inf, 0.0))


def direct_runs(layer: FoldedLayer, x_BCHW: Tensor) -> bool:
    """Whether a layer can be run this way."""
    if x_BCHW.device.type != "cpu" or x_BCHW.dtype != torch.float32 or len(x_BCHW) != 1:
        return False
    if layer.weight[0, 0].numel() > MOST_TAPS:
        return False
    return math.prod(layer.output_size(*x_BCHW.shape[2:])) >= FEWEST_POSITIONS


class _Planes:
    """A convolution's input as planes in which each tap is one shift away from the output.

    Rows are so wide that they hold the padding, and a vector may run on from one row to the next:
    a few sums between the rows are nobody's. With a stride s, the s x s phases of the input are
    planes of their own.

    Args:
        layer: the convolution.
        size: height and width of its input.
    """

    def __init__(self, layer: FoldedLayer, size: tuple[int, ...]) -> None:
        self.layer, self.size = layer, tuple(size)
        self.out = layer.output_size(*size)
        padded = [n + 2 * p for n, p in zip(size, layer.padding, strict=True)]
        height, self.width = (-(-n // s) for n, s in zip(padded, layer.stride, strict=True))
        self.positions = self.out[0] * self.width
        self.phases = (*layer.stride, height, self.width)
        self.floats = math.prod(self.phases)
        self.memory = torch.zeros(0)
        self.parts: list[Tensor] = []

    def tap_places(self) -> Iterator[int]:
        """Where each tap finds its value for the first position."""
        s, t, height, width = self.phases
        for tap in product(*map(range, self.layer.weight.shape[2:])):
            y, x = (at * d for at, d in zip(tap, self.layer.dilation, strict=True))
            yield ((y % s * t + x % t) * height + y // s) * width + x // t

    def fill(self, x_CHW: Tensor) -> Tensor:
        """Brings an input into this form, in memory that is used again."""
        room = (x_CHW.shape[0] + 1) * self.floats  # vectors may reach beyond the last plane
        if self.memory.numel() < room + LARGEST_VECTOR:
            self.memory = torch.zeros(room + LARGEST_VECTOR)
            self.parts = [self._inside(self.memory[:room], phase) for phase in self._starts()]
        for part, (_, top, left) in zip(self.parts, self._starts(), strict=True):
            s, t = self.layer.stride
            # Padding is never written to, and stays zero.
            part[: x_CHW.shape[0]].copy_(x_CHW if s == t == 1 else x_CHW[:, top::s, left::t])
        return self.memory

    def _starts(self) -> list[tuple[tuple[int, int], int, int]]:
        """The phases, and where in the input each begins."""
        (s, t), (above, before) = self.layer.stride, self.layer.padding
        return [((y, x), (y - above) % s, (x - before) % t) for y, x in product(range(s), range(t))]

    def _inside(self, memory: Tensor, start: tuple[tuple[int, int], int, int]) -> Tensor:
        (y, x), top, left = start
        (s, t), (above, before) = self.layer.stride, self.layer.padding
        down, right = (top + above) // s, (left + before) // t
        rows, columns = len(range(top, self.size[0], s)), len(range(left, self.size[1], t))
        return memory.view(-1, *self.phases)[:, y, x, down : down + rows, right : right + columns]


class _Windows:
    """A small input with one plane for each tap, which holds just what the tap sees.

    It takes more memory, but no sums are in vain.

    Args:
        layer: the convolution.
        size: height and width of its input.
    """

    def __init__(self, layer: FoldedLayer, size: tuple[int, ...]) -> None:
        self.layer, self.size = layer, tuple(size)
        self.out = layer.output_size(*size)
        self.width = self.out[1]
        self.positions = self.out[0] * self.out[1]
        self.kernel = tuple(layer.weight.shape[2:])
        self.floats = math.prod(self.kernel) * self.positions
        self.memory = torch.empty(0)
        self.padded = torch.zeros(0)

    def tap_places(self) -> Iterator[int]:
        """Where each tap finds its value for the first position."""
        return iter(range(0, self.floats, self.positions))

    def fill(self, x_CHW: Tensor) -> Tensor:
        """Brings an input into this form, in memory that is used again."""
        channels, height, width = x_CHW.shape
        above, before = self.layer.padding
        if self.padded.shape[0] < channels:
            self.padded = x_CHW.new_zeros(channels, height + 2 * above, width + 2 * before)
            self.memory = x_CHW.new_empty(channels * self.floats + LARGEST_VECTOR)
        self.padded[:channels, above : above + height, before : before + width] = x_CHW
        plane, row, _ = self.padded.stride()
        (s, t), (d, e) = self.layer.stride, self.layer.dilation
        shape = (channels, *self.kernel, *self.out)
        windows = self.padded.as_strided(shape, (plane, d * row, e, s * row, t))
        self.memory[: channels * self.floats].view(shape).copy_(windows)
        return self.memory


def _layout(layer: FoldedLayer, size: tuple[int, ...]) -> _Planes | _Windows:
    """The form of the input in which vectors hold more results."""
    from deepmoe.sparse.llvm_code import machine

    planes, windows = _Planes(layer, size), _Windows(layer, size)
    vectors = [-(-form.positions // machine().lanes) for form in (planes, windows)]
    return windows if 4 * vectors[1] <= 3 * vectors[0] else planes


Forms = dict[Hashable, _Planes | _Windows]


class DirectConvolution:
    """Convolves single images of one size. What depends on layer and size only is made once.

    Args:
        layer: all channels.
        size: height and width of the input.
        forms: of inputs, with their memory, shared by layers that run one after the other.
    """

    def __init__(self, layer: FoldedLayer, size: tuple[int, ...], forms: Forms) -> None:
        from deepmoe.sparse.llvm_code import machine

        self.layer = layer
        form = self.form = forms.setdefault(_geometry(layer, size), _layout(layer, size))
        outputs, inputs, *kernel = layer.weight.shape
        # A product takes its input as it is.
        self.as_it_is = kernel == [1, 1] and layer.stride == (1, 1) and layer.padding == (0, 0)
        self.vectors = -(-form.positions // machine().lanes)
        self.step = self.vectors * machine().lanes
        self.bias = layer.weight.new_zeros(outputs) if layer.bias is None else layer.bias
        self.ones = torch.ones(outputs)
        self.numbers = torch.arange(max(outputs, inputs))
        self.tap_places = torch.tensor(list(form.tap_places()))
        self.tiles: dict[int, Tile] = {}

    def __call__(
        self,
        x_BCHW: Tensor,
        onto: Tensor | None,
        outs: Tensor | None,
        ins: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        """The convolution with bias, ReLU (and sum before it) and gate of one image.

        Args:
            x_BCHW: active channels of one image.
            onto: to add, with all outputs.
            outs: numbers of the active outputs; `None` is all.
            ins: numbers of the active inputs; `None` is all.
            gate: of the active outputs.
        """
        from deepmoe.sparse.direct_kernel import direct_kernel

        weight, step, form = self.layer.weight, self.step, self.form
        outputs = weight.shape[0] if outs is None else outs.shape[0]
        inputs = x_BCHW.shape[1]
        tile = self._tile(outputs)
        groups, blocks = -(-self.vectors // tile.vectors), -(-outputs // tile.outputs)
        out = torch.empty(outputs, step)
        x, x_step = self._input(x_BCHW)
        added, added_step = out, 0
        if onto is not None:
            added, added_step = _in_planes(onto, form.width, step)
        arrays = (
            *(x, weight, self.bias, self.ones if gate is None else gate, out, added),
            *(self.numbers if n is None else n for n in (outs, ins)),
            self.tap_places,
        )
        taps = self.tap_places.shape[0]
        # What is read again and again should stay in the cache: the input, or else a part of it.
        x_bytes, weight_bytes = 4 * inputs * x_step, 4 * inputs * taps * outputs
        if x_bytes <= CACHE or x_bytes * blocks <= weight_bytes * groups:
            order = (groups, blocks, 1, groups)
        else:
            order = (1, blocks, blocks, groups)
        least = ZERO if self.layer.relu or onto is not None else MINUS_INFINITY
        run_on_threads(
            direct_kernel(taps, tile, onto is not None),
            groups * blocks,
            [
                *(inputs, outputs, self.vectors, *order),
                *[array.data_ptr() for array in arrays],
                *(weight.stride(0), x_step, step, added_step, least),
            ],
        )
        strides = (outputs * step, step, form.width, 1)
        return out.as_strided((1, outputs, *form.out), strides)

    def _input(self, x_BCHW: Tensor) -> tuple[Tensor, int]:
        """The input as planes, and how far these are apart."""
        if self.as_it_is:
            return _in_planes(x_BCHW, self.form.width, self.step)
        return self.form.fill(x_BCHW[0]), self.form.floats

    def _tile(self, outputs: int) -> "Tile":
        if outputs not in self.tiles:
            self.tiles[outputs] = _fastest_tile(self.vectors, outputs)
        return self.tiles[outputs]


def _geometry(layer: FoldedLayer, size: tuple[int, ...]) -> Hashable:
    kernel = layer.weight.shape[2:]
    return (*kernel, *layer.stride, *layer.padding, *layer.dilation, *size)


def _fastest_tile(vectors: int, outputs: int) -> "Tile":
    """Of the tiles that fit."""
    from deepmoe.sparse.direct_kernel import tiles

    fit = [t for t in tiles() if t.vectors <= vectors and t.outputs <= outputs]
    return min(fit, key=lambda t: t.cost * t.vectors * -(-vectors // t.vectors))


def _in_planes(x_BCHW: Tensor, wide: int, step: int) -> tuple[Tensor, int]:
    """The same values in rows of this width, such that whole vectors can be read from each plane.

    That is how this convolution leaves its own results, so that mostly nothing is copied.

    Returns:
        The planes, and how far they are apart.
    """
    _, channels, height, width = x_BCHW.shape
    apart = x_BCHW.stride(1)
    last = x_BCHW.storage_offset() + (channels - 1) * apart + step
    if x_BCHW.stride()[2:] == (wide, 1) and 4 * last <= x_BCHW.untyped_storage().nbytes():
        return x_BCHW, apart
    planes = torch.empty(channels, step)
    planes[:, : height * wide].view(channels, height, wide)[:, :, :width].copy_(x_BCHW[0])
    return planes, step
