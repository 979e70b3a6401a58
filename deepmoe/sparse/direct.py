"""A convolution of one image that reads weights where they lie, of active channels alone.

Vectors run over positions, so that a weight is a single number: which outputs and inputs it belongs
to does not matter, and nothing has to be collected.
"""

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.threads import run_on_threads

if TYPE_CHECKING:
    from deepmoe.sparse.direct_kernel import Tile

MOST_TAPS = 9  # the code holds every tap
CACHE = 2**19  # bytes that stay in a core's own cache
MINUS_INFINITY, ZERO = (int(np.float32(f).view(np.uint32)) for f in (-np.inf, 0.0))


def direct_runs(layer: FoldedLayer, x_BCHW: Tensor) -> bool:
    """Whether a layer can be run this way."""
    if x_BCHW.device.type != "cpu" or x_BCHW.dtype != torch.float32 or len(x_BCHW) != 1:
        return False
    if layer.weight[0, 0].numel() > MOST_TAPS:
        return False
    return _tile(_Planes(layer, x_BCHW.shape[2:]).positions, outputs=1) is not None


class _Planes:
    """A convolution's input as planes in which each tap is one shift away from the output.

    Rows are so wide that they hold the padding, and a vector may run on from one row to the next:
    a few sums between the rows are nobody's. With a stride s, the s x s phases of the input are
    planes of their own.
    """

    def __init__(self, layer: FoldedLayer, size: tuple[int, ...]) -> None:
        self.kernel = tuple(layer.weight.shape[2:])
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.size = tuple(size)
        self.out = layer.output_size(*size)
        padded = [n + 2 * p for n, p in zip(size, layer.padding, strict=True)]
        self.height, self.width = (-(-n // s) for n, s in zip(padded, layer.stride, strict=True))
        self.positions = self.out[0] * self.width
        self.floats = self.stride[0] * self.stride[1] * self.height * self.width
        # A product takes its input as it is.
        self.as_it_is = self.kernel == self.stride == (1, 1) and self.padding == (0, 0)

    def tap_places(self) -> Iterator[int]:
        """Where each tap finds its value for the first position."""
        for tap in product(*map(range, self.kernel)):
            (h, y), (w, x) = (
                divmod(at * d, s) for at, d, s in zip(tap, self.dilation, self.stride, strict=True)
            )
            yield ((y * self.stride[1] + x) * self.height + h) * self.width + w

    def parts(self, planes: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Which rows and columns of the input go where."""
        (s, t), (height, width) = self.stride, self.size
        phases = planes.view(-1, s, t, self.height, self.width)
        for y, x in product(range(s), range(t)):
            top, left = (y - self.padding[0]) % s, (x - self.padding[1]) % t
            down, right = (top + self.padding[0]) // s, (left + self.padding[1]) // t
            rows, columns = len(range(top, height, s)), len(range(left, width, t))
            to = phases[:, y, x, down : down + rows, right : right + columns]
            yield (slice(top, None, s), slice(left, None, t)), to


class DirectConvolution:
    """Convolves single images of one size. What depends on layer and size only is made once.

    Args:
        layer: all channels.
        size: height and width of the input.
        memory: for inputs with their padding, shared by layers that run one after the other.
    """

    def __init__(
        self, layer: FoldedLayer, size: tuple[int, ...], memory: dict[object, Tensor]
    ) -> None:
        from deepmoe.sparse import direct_kernel

        self.layer = layer
        planes = self.planes = _Planes(layer, size)
        outputs, inputs, *_ = layer.weight.shape
        lanes = direct_kernel.machine().lanes
        self.vectors = -(-planes.positions // lanes)
        self.step = self.vectors * lanes
        self.bias = layer.weight.new_zeros(outputs) if layer.bias is None else layer.bias
        self.ones = torch.ones(outputs)
        self.numbers = torch.arange(max(outputs, inputs))
        self.tap_places = torch.tensor(list(planes.tap_places()))
        self.tiles: dict[int, Tile | None] = {}
        self.floats = inputs * planes.floats
        if not planes.as_it_is:
            room = self.floats + self.step  # vectors may reach beyond the last plane
            key = (planes.kernel, planes.stride, planes.padding, planes.dilation, planes.size)
            if key not in memory or len(memory[key]) < room:
                memory[key] = torch.zeros(room)
            self.memory = memory[key]  # its padding is never written to, and stays zero
            self.parts = list(planes.parts(self.memory[: self.floats]))

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

        weight, step, planes = self.layer.weight, self.step, self.planes
        outputs = weight.shape[0] if outs is None else outs.shape[0]
        inputs = x_BCHW.shape[1]
        tile = self._tile(outputs)
        groups, blocks = -(-self.vectors // tile.vectors), -(-outputs // tile.outputs)
        out = torch.empty(outputs, step)
        x, x_step = self._input(x_BCHW)
        added, added_step = out, 0
        if onto is not None:
            added, added_step = _in_planes(onto, planes.width, step)
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
        strides = (outputs * step, step, planes.width, 1)
        return out.as_strided((1, outputs, *planes.out), strides)

    def _input(self, x_BCHW: Tensor) -> tuple[Tensor, int]:
        """The input as planes, and how far these are apart."""
        if self.planes.as_it_is:
            return _in_planes(x_BCHW, self.planes.width, self.step)
        for (rows, columns), to in self.parts:
            whole = self.planes.stride == (1, 1)
            part = x_BCHW[0] if whole else x_BCHW[0, :, rows, columns]
            to[: x_BCHW.shape[1]].copy_(part)
        return self.memory, self.planes.floats

    def _tile(self, outputs: int) -> "Tile":
        if outputs not in self.tiles:
            self.tiles[outputs] = _tile(self.planes.positions, outputs)
        tile = self.tiles[outputs]
        assert tile is not None
        return tile


def _tile(positions: int, outputs: int) -> "Tile | None":
    """The fastest of the tiles that fit."""
    from deepmoe.sparse.direct_kernel import machine

    vectors = -(-positions // machine().lanes)
    fit = [t for t in machine().tiles if t.vectors <= vectors and t.outputs <= outputs]
    return min(fit, key=lambda t: t.cost * t.vectors * -(-vectors // t.vectors), default=None)


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
