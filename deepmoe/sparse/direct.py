"""A convolution of one image that reads weights where they lie, of active channels alone.

Vectors run over positions, so that a weight is a single number: which outputs and inputs it belongs
to does not matter, and nothing has to be collected.
"""

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.threads import Runs, run_on_threads, some_of

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
    if layer.groups > 1 or layer.weight[0, 0].numel() > MOST_TAPS:
        return False
    return math.prod(layer.output_size(*x_BCHW.shape[2:])) >= FEWEST_POSITIONS


class _Form:
    """How an input is laid out, such that each tap finds its values one shift away from the output.

    Args:
        layer: the convolution.
        size: height and width of its input.
    """

    width: int  # from one row of the output to the next
    positions: int  # that vectors run over
    floats: int  # of one channel

    def __init__(self, layer: FoldedLayer, size: tuple[int, ...]) -> None:
        self.layer, self.size = layer, tuple(size)
        self.out = layer.output_size(*size)
        self.memory = torch.empty(0)
        self.places: dict[int, Tensor] = {}

    def tap_places(self) -> list[int]:
        """Where each tap finds its value for the first position."""
        raise NotImplementedError

    def coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of the padded input that stand at each place, for one channel."""
        raise NotImplementedError

    def fill(self, x_CHW: Tensor, run: Runs) -> Tensor:
        """Brings an input into this form, in memory that is used again."""
        from deepmoe.sparse.numba_kernels import arrange

        if x_CHW.stride(2) != 1:
            x_CHW = x_CHW.contiguous()
        channels, step, row = x_CHW.shape[0], x_CHW.stride(0), x_CHW.stride(1)
        room = (channels + 1) * self.floats + LARGEST_VECTOR  # vectors may reach beyond the last
        if self.memory.shape[0] < room:
            self.memory = torch.zeros(room, dtype=torch.float32)
        if row not in self.places:
            self.places[row] = self._places(row)
        arrays = (x_CHW, self.places[row], self.memory)
        run(arrange.ctypes, channels, [self.floats, step, some_of(channels), *arrays])
        return self.memory

    def _places(self, row: int) -> Tensor:
        y, x = (c - p for c, p in zip(self.coordinates(), self.layer.padding, strict=True))
        inside = (y >= 0) & (y < self.size[0]) & (x >= 0) & (x < self.size[1])
        return torch.from_numpy(np.where(inside, y * row + x, -1).astype(np.int32).ravel())


class _Planes(_Form):
    """Planes as they are, with their padding.

    A vector may run on from one row to the next: a few sums between the rows are nobody's. With a
    stride s, the s x s phases of the input are planes of their own.
    """

    def __init__(self, layer: FoldedLayer, size: tuple[int, ...]) -> None:
        super().__init__(layer, size)
        padded = [n + 2 * p for n, p in zip(size, layer.padding, strict=True)]
        height, self.width = (-(-n // s) for n, s in zip(padded, layer.stride, strict=True))
        self.positions = self.out[0] * self.width
        self.phases = (*layer.stride, height, self.width)
        self.floats = math.prod(self.phases)

    def tap_places(self) -> list[int]:
        s, t, height, width = self.phases
        (d, e), taps = self.layer.dilation, np.indices(self.layer.weight.shape[2:])
        y, x = taps[0].ravel() * d, taps[1].ravel() * e
        return list(((y % s * t + x % t) * height + y // s) * width + x // t)

    def coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        (s, t), (phase_y, phase_x, row, column) = self.layer.stride, np.indices(self.phases)
        return row * s + phase_y, column * t + phase_x


class _Windows(_Form):
    """One plane for each tap, which holds just what the tap sees: no sums are in vain.

    That takes more memory, which is why it is for small inputs.
    """

    def __init__(self, layer: FoldedLayer, size: tuple[int, ...]) -> None:
        super().__init__(layer, size)
        self.width = self.out[1]
        self.positions = self.out[0] * self.out[1]
        self.floats = layer.weight[0, 0].numel() * self.positions

    def tap_places(self) -> list[int]:
        return list(range(0, self.floats, max(1, self.positions)))

    def coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (*self.layer.weight.shape[2:], *self.out)
        (s, t), (d, e), (ky, kx, y, x) = self.layer.stride, self.layer.dilation, np.indices(shape)
        return y * s + ky * d, x * t + kx * e


def _best_form(layer: FoldedLayer, size: tuple[int, ...]) -> _Form:
    """The form of the input in which vectors hold more results."""
    from deepmoe.sparse.llvm_code import machine

    planes, windows = _Planes(layer, size), _Windows(layer, size)
    vectors = [-(-form.positions // machine().lanes) for form in (planes, windows)]
    return windows if 4 * vectors[1] <= 3 * vectors[0] else planes


Forms = dict[Hashable, _Form]


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
        form = self.form = forms.setdefault(_geometry(layer, size), _best_form(layer, size))
        outputs, inputs, *kernel = layer.weight.shape
        # A product takes its input as it is.
        self.as_it_is = kernel == [1, 1] and layer.stride == (1, 1) and layer.padding == (0, 0)
        self.vectors = -(-form.positions // machine().lanes)
        self.step = self.vectors * machine().lanes
        self.bias = layer.weight.new_zeros(outputs) if layer.bias is None else layer.bias
        self.ones = torch.ones(outputs, dtype=torch.float32)
        self.numbers = torch.arange(max(outputs, inputs))
        self.tap_places = torch.tensor(form.tap_places())
        self.tiles: dict[int, Tile] = {}

    def __call__(
        self,
        x_BCHW: Tensor,
        onto: Tensor | None,
        outs: Tensor | None,
        ins: Tensor | None,
        gate: Tensor | None,
        run: Runs = run_on_threads,
    ) -> Tensor:
        """The convolution with bias, ReLU (and sum before it) and gate of one image.

        Args:
            x_BCHW: active channels of one image.
            onto: to add, with all outputs.
            outs: numbers of the active outputs; `None` is all.
            ins: numbers of the active inputs; `None` is all.
            gate: of the active outputs.
            run: what runs tasks.
        """
        from deepmoe.sparse.direct_kernel import direct_kernel

        weight, step, form = self.layer.weight, self.step, self.form
        outputs = weight.shape[0] if outs is None else outs.shape[0]
        inputs = x_BCHW.shape[1]
        tile = self._tile(outputs)
        groups, blocks = -(-self.vectors // tile.vectors), -(-outputs // tile.outputs)
        out = torch.empty(outputs, step, dtype=torch.float32)
        x, x_step = self._input(x_BCHW, run)
        added, added_step = out, 0
        if onto is not None:
            added, added_step = in_planes(onto, form.width, step)
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
        least = ZERO if self.layer.relu else MINUS_INFINITY
        run(
            direct_kernel(taps, tile, onto is not None),
            groups * blocks,
            [
                *(inputs, outputs, self.vectors, *order),
                *arrays,
                *(weight.stride(0), x_step, step, added_step, least, some_of(groups * blocks)),
            ],
        )
        strides = (outputs * step, step, form.width, 1)
        self.layer.activate_other(out)
        return out.as_strided((1, outputs, *form.out), strides)

    def _input(self, x_BCHW: Tensor, run: Runs) -> tuple[Tensor, int]:
        """The input as planes, and how far these are apart."""
        if self.as_it_is:
            return in_planes(x_BCHW, self.form.width, self.step)
        return self.form.fill(x_BCHW[0], run), self.form.floats

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


def are_planes(x_BCHW: Tensor, wide: int, step: int) -> bool:
    """Whether values are in rows of this width, and whole vectors can be read from each plane."""
    last = x_BCHW.storage_offset() + (x_BCHW.shape[1] - 1) * x_BCHW.stride(1) + step
    return x_BCHW.stride()[2:] == (wide, 1) and 4 * last <= x_BCHW.untyped_storage().nbytes()


def in_planes(x_BCHW: Tensor, wide: int, step: int) -> tuple[Tensor, int]:
    """The same values in rows of this width, such that whole vectors can be read from each plane.

    That is how this convolution leaves its own results, so that mostly nothing is copied.

    Returns:
        The planes, and how far they are apart.
    """
    _, channels, height, width = x_BCHW.shape
    if are_planes(x_BCHW, wide, step):
        return x_BCHW, x_BCHW.stride(1)
    planes = torch.empty(channels, step, dtype=torch.float32)
    planes[:, : height * wide].view(channels, height, wide)[:, :, :width].copy_(x_BCHW[0])
    return planes, step
