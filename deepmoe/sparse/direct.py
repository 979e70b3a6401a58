"""A convolution of one image that reads weights where they lie, of active channels alone.

Vectors run over positions, so that a weight is a single number: which outputs and inputs it belongs
to does not matter, and nothing has to be collected.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.threads import run_on_threads

MOST_TAPS = 9  # the code holds every tap
MINUS_INFINITY, ZERO = (int(np.float32(f).view(np.uint32)) for f in (-np.inf, 0.0))


@dataclass(frozen=True)
class _Shape:
    """A convolution's input as planes in which each tap is one shift away from the output.

    Rows are so wide that they hold the padding, and a vector may run on from one row to the next:
    a few sums between the rows are nobody's. With a stride s, the s x s phases of the input are
    planes of their own.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    size: tuple[int, int]  # of the input
    out: tuple[int, int]
    phase: tuple[int, int]  # size of one phase

    @property
    def positions(self) -> int:
        return self.out[0] * self.phase[1]

    @property
    def plane(self) -> int:
        """Floats of one input channel."""
        return self.stride[0] * self.stride[1] * self.phase[0] * self.phase[1]

    @property
    def is_product(self) -> bool:
        """Whether the input is taken as it is."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    def tap_places(self) -> list[int]:
        places = []
        for tap in product(range(self.kernel[0]), range(self.kernel[1])):
            (h, y), (w, x) = (
                divmod(at * d, s) for at, d, s in zip(tap, self.dilation, self.stride, strict=True)
            )
            phase = y * self.stride[1] + x
            places.append((phase * self.phase[0] + h) * self.phase[1] + w)
        return places


@cache
def _shape(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    size: tuple[int, int],
    out: tuple[int, int],
) -> _Shape:
    padded = [n + 2 * p for n, p in zip(size, padding, strict=True)]
    height, width = (-(-n // s) for n, s in zip(padded, stride, strict=True))
    return _Shape(kernel, stride, padding, dilation, size, out, (height, width))


class DirectConvolution:
    """Convolves single images; what it needs for that is made once."""

    def __init__(self) -> None:
        self.planes: dict[_Shape, Tensor] = {}
        self.tap_places: dict[_Shape, Tensor] = {}
        self.ones = torch.ones(0)
        self.zeros = torch.zeros(0)
        self.numbers = torch.arange(0)

    def runs(self, layer: FoldedLayer, x_BCHW: Tensor, outputs: int) -> bool:
        """Whether a layer can be run this way, with so many active outputs."""
        if x_BCHW.device.type != "cpu" or x_BCHW.dtype != torch.float32 or len(x_BCHW) != 1:
            return False
        if layer.weight[0, 0].numel() > MOST_TAPS:
            return False
        shape = self._shape(layer, x_BCHW)
        return shape.positions > 0 and _tile(shape, outputs) is not None

    def __call__(
        self,
        layer: FoldedLayer,
        x_BCHW: Tensor,
        onto: Tensor | None,
        outs: Tensor | None,
        ins: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        """The convolution with bias, ReLU (and sum before it) and gate of one image.

        Args:
            layer: all channels.
            x_BCHW: active channels of one image.
            onto: to add, with all outputs.
            outs: numbers of the active outputs; `None` is all.
            ins: numbers of the active inputs; `None` is all.
            gate: of the active outputs.
        """
        from deepmoe.sparse import direct_kernel

        shape = self._shape(layer, x_BCHW)
        outs = self._first_numbers(len(layer.weight)) if outs is None else outs
        ins = self._first_numbers(layer.weight.shape[1]) if ins is None else ins
        taps, lanes = shape.kernel[0] * shape.kernel[1], direct_kernel.machine().lanes
        tile = _tile(shape, len(outs))
        assert tile is not None
        vectors = -(-shape.positions // lanes)
        groups, blocks = -(-vectors // tile.vectors), -(-len(outs) // tile.outputs)
        step = vectors * lanes
        out = torch.empty(len(outs), step)
        x, x_step = self._input(shape, x_BCHW, step)
        added, added_step = out, 0
        if onto is not None:
            added, added_step = _in_planes(onto, shape.phase[1], step)
        bias = self._zeros(len(layer.weight)) if layer.bias is None else layer.bias
        gate = self._ones(len(outs)) if gate is None else gate
        # Rows are fetched a few inputs ahead, also at the end of the list.
        places = torch.cat([ins, ins[-1:].expand(direct_kernel.AHEAD)]) * taps
        if shape not in self.tap_places:
            self.tap_places[shape] = torch.tensor(shape.tap_places())
        arrays = (x, layer.weight, bias, gate, out, added, outs, places, self.tap_places[shape])
        least = ZERO if layer.relu or onto is not None else MINUS_INFINITY
        row = layer.weight.shape[1] * taps
        run_on_threads(
            direct_kernel.direct_kernel(taps, tile, onto is not None),
            groups * blocks,
            [
                *(len(ins), groups, len(outs), vectors),
                *(array.data_ptr() for array in arrays),
                *(row, x_step, step, added_step, least),
            ],
        )
        (height, width), wide = shape.out, shape.phase[1]
        return out.as_strided((1, len(outs), height, width), (out.numel(), step, wide, 1))

    def _shape(self, layer: FoldedLayer, x_BCHW: Tensor) -> _Shape:
        size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
        kernel = tuple(layer.weight.shape[2:])
        geometry = (kernel, layer.stride, layer.padding, layer.dilation)
        return _shape(*geometry, size, layer.output_size(*size))  # type: ignore[arg-type]

    def _input(self, shape: _Shape, x_BCHW: Tensor, step: int) -> tuple[Tensor, int]:
        """The input as planes, and how far these are apart."""
        if shape.is_product:
            return _in_planes(x_BCHW, shape.phase[1], step)
        channels = x_BCHW.shape[1]
        planes = self.planes.get(shape)
        room = channels * shape.plane + step  # vectors may reach beyond the last plane
        if planes is None or len(planes) < room:
            planes = self.planes[shape] = torch.zeros(room)  # and zero the padding stays
        (s, t), (high, wide), (height, width) = shape.stride, shape.phase, shape.size
        used = planes[: channels * shape.plane].view(channels, s, t, high, wide)
        for y, x in product(range(s), range(t)):
            # Where in the input, and where in its plane, a phase begins.
            top, left = (y - shape.padding[0]) % s, (x - shape.padding[1]) % t
            part = x_BCHW[0, :, top:height:s, left:width:t]
            down, right = (top + shape.padding[0]) // s, (left + shape.padding[1]) // t
            to = used[:, y, x, down : down + part.shape[1], right : right + part.shape[2]]
            to.copy_(part)
        return planes, shape.plane

    def _first_numbers(self, count: int) -> Tensor:
        if len(self.numbers) < count:
            self.numbers = torch.arange(count)
        return self.numbers[:count]

    def _ones(self, count: int) -> Tensor:
        if len(self.ones) < count:
            self.ones = torch.ones(count)
        return self.ones

    def _zeros(self, count: int) -> Tensor:
        if len(self.zeros) < count:
            self.zeros = torch.zeros(count)
        return self.zeros


def _tile(shape: _Shape, outputs: int):  # type: ignore[no-untyped-def]
    """The tile that wastes the least, of those that fit; the first of equal ones is the fastest."""
    from deepmoe.sparse.direct_kernel import machine

    vectors = -(-shape.positions // machine().lanes)
    fit = [t for t in machine().tiles if t.vectors <= vectors and t.outputs <= outputs]
    return min(fit, key=lambda t: -(-vectors // t.vectors) * t.vectors, default=None)


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
