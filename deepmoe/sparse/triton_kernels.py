"""GPU kernels that PyTorch has no operator for, or a slow one. Imported for CUDA devices only.

Activations are channels last in memory. Each program takes a tile of positions by channels, so
that only its corner has to be found by divisions. Sizes that loads do not profit from are not
specialised: each variant of a kernel takes half a second to compile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def"

BLOCK = 256
TILE = 4096  # elements that one program of the others takes


@triton.jit
def _collect_kernel(
    source, outs, ins, out, taps, inputs, active, BLOCK: tl.constexpr
):  # pragma: no cover
    """One tap of one output channel: its weights of the active input channels."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < active
    output = tl.load(outs + row // taps)
    start = (output * taps + row % taps) * inputs
    channel = tl.load(ins + columns, mask=inside, other=0)
    value = tl.load(source + start + channel, mask=inside)
    tl.store(out + row.to(tl.int64) * active + columns, value, mask=inside)


def collect(weight: Tensor, outs: Tensor, ins: Tensor) -> Tensor:
    """weight[outs][:, ins] in one pass, for weights whose channels lie last in memory."""
    taps = weight.shape[2] * weight.shape[3]
    flat = weight.permute(0, 2, 3, 1)
    assert flat.is_contiguous()
    out = torch.empty(
        len(outs), *weight.shape[2:], len(ins), dtype=weight.dtype, device=weight.device
    )
    grid = (len(outs) * taps, triton.cdiv(len(ins), BLOCK))
    _collect_kernel[grid](flat, outs, ins, out, taps, weight.shape[1], len(ins), BLOCK=BLOCK)
    return out.permute(0, 3, 1, 2)


@triton.jit(do_not_specialize=["positions", "tiles"])
def _finish_kernel(
    x,
    scale,
    bias,
    gate,
    gate_stride,
    positions,
    channels,
    tiles,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover
    image = tl.program_id(0) // tiles
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < channels
    inside = (row < positions)[:, None] & there[None, :]
    at = x + image.to(tl.int64) * positions * channels + row[:, None] * channels + column[None, :]
    y = tl.load(at, mask=inside).to(tl.float32)
    if SCALE:
        y *= tl.load(scale + column, mask=there).to(tl.float32)[None, :]
    if BIAS:
        y += tl.load(bias + column, mask=there).to(tl.float32)[None, :]
    if RELU:
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if GATE:
        at_gate = gate + image.to(tl.int64) * gate_stride + column
        y *= tl.load(at_gate, mask=there).to(tl.float32)[None, :]
    tl.store(at, y.to(x.dtype.element_ty), mask=inside)


def finish_(
    x_BCHW: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """What follows a convolution, in place and in one pass: gate * relu(scale * x + bias).

    Args:
        x_BCHW: channels last; written over.
        scale: of each channel.
        bias: of each channel.
        gate: of each image and channel.
        relu: whether there is a ReLU.
    """
    images, channels, height, width = x_BCHW.shape
    assert x_BCHW.is_contiguous(memory_format=torch.channels_last)
    assert gate is None or channels == 1 or gate.stride(1) == 1
    rows, columns = _tile(channels)
    tiles = triton.cdiv(height * width, rows)
    _finish_kernel[(images * tiles, triton.cdiv(channels, columns))](
        x_BCHW,
        x_BCHW if scale is None else scale,
        x_BCHW if bias is None else bias,
        x_BCHW if gate is None else gate,
        0 if gate is None else gate.stride(0),
        height * width,
        channels,
        tiles,
        SCALE=scale is not None,
        BIAS=bias is not None,
        GATE=gate is not None,
        RELU=relu,
        ROWS=rows,
        COLUMNS=columns,
    )
    return x_BCHW


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "tiles"])
def _max_pool_kernel(
    x,
    gate,
    gate_stride,
    out,
    height,
    width,
    channels,
    out_height,
    out_width,
    tiles,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover
    line = tl.program_id(0) // tiles  # of all images
    image, top = line // out_height, (line % out_height) * STRIDE - PADDING
    position = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (position < out_width)[:, None] & (column < channels)[None, :]
    best = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    for dy in tl.static_range(SIZE):
        h = top + dy + tl.zeros_like(position)  # a vector, as the interpreter needs it
        for dx in tl.static_range(SIZE):
            w = position * STRIDE - PADDING + dx
            inside = there & ((w >= 0) & (w < width) & (h >= 0) & (h < height))[:, None]
            start = ((image.to(tl.int64) * height + h) * width * channels)[:, None]
            at = x + start + w[:, None] * channels + column[None, :]
            value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, value, float("-inf"))
            best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    if GATE:
        at_gate = gate + image.to(tl.int64) * gate_stride + column
        best *= tl.load(at_gate, mask=column < channels).to(tl.float32)[None, :]
    start = line.to(tl.int64) * out_width * channels
    to = out + start + position[:, None] * channels + column[None, :]
    tl.store(to, best.to(out.dtype.element_ty), mask=there)


def max_pool(
    x_BCHW: Tensor, size: int, stride: int, padding: int, gate: Tensor | None = None
) -> Tensor:
    """Max pooling of a tensor that is channels last, as is the result.

    Args:
        x_BCHW: to pool.
        size: of the windows.
        stride: from one window to the next.
        padding: how far the first one lies outside.
        gate: of each image and channel; multiplies the maxima.
    """
    images, channels, height, width = x_BCHW.shape
    assert x_BCHW.is_contiguous(memory_format=torch.channels_last)
    assert gate is None or channels == 1 or gate.stride(1) == 1
    out_height, out_width = ((n + 2 * padding - size) // stride + 1 for n in (height, width))
    out = x_BCHW.new_empty(images, out_height, out_width, channels)
    columns = min(128, triton.next_power_of_2(channels))
    rows = min(triton.next_power_of_2(out_width), TILE // 4 // columns)
    tiles = triton.cdiv(out_width, rows)
    _max_pool_kernel[(images * out_height * tiles, triton.cdiv(channels, columns))](
        x_BCHW,
        x_BCHW if gate is None else gate,
        0 if gate is None else gate.stride(0),
        out,
        height,
        width,
        channels,
        out_height,
        out_width,
        tiles,
        SIZE=size,
        STRIDE=stride,
        PADDING=padding,
        GATE=gate is not None,
        ROWS=rows,
        COLUMNS=columns,
    )
    return out.permute(0, 3, 1, 2)


@triton.jit(
    do_not_specialize=["height", "width", "image_step", "line_step", "lines", "columns", "tiles"]
)
def _patches_kernel(
    x,
    out,
    height,
    width,
    image_step,
    channel_step,
    line_step,
    column_step,
    lines,
    columns,
    tiles,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,
):  # pragma: no cover
    line = tl.program_id(0) // tiles  # of all images
    image, top = line // lines, (line % lines) * STRIDE - PADDING
    position = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    value = tl.arange(0, ROOM)
    tap = value // CHANNELS
    h, channel = top + tap // SIZE, value % CHANNELS
    w = (position * STRIDE - PADDING)[:, None] + (tap % SIZE)[None, :]
    inside = (tap < SIZE * SIZE) & (h >= 0) & (h < height)
    inside = inside[None, :] & (w >= 0) & (w < width) & (position < columns)[:, None]
    at = x + image.to(tl.int64) * image_step + w * column_step
    at += (h * line_step + channel * channel_step)[None, :]
    y = tl.load(at, mask=inside, other=0.0)
    to = out + (line.to(tl.int64) * columns + position[:, None]) * VALUES + value[None, :]
    there = (position < columns)[:, None] & (value < VALUES)[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=there)


def patches(
    x_BCHW: Tensor,
    *,
    size: int,
    stride: int,
    padding: int,
    grid: tuple[int, int],
    values: int,
    dtype: torch.dtype,
) -> Tensor:
    """Squares of an image as the channels of a smaller one; zeros beyond its borders.

    Args:
        x_BCHW: in any memory format and dtype.
        size: of the squares.
        stride: from one square to the next.
        padding: how far the first one lies outside.
        grid: number of squares, down and across.
        values: channels of the result: size * size * channels, and zeros after them.
        dtype: of the result, which is channels last.
    """
    images, channels, height, width = x_BCHW.shape
    lines, columns = grid
    out = torch.empty(images, lines, columns, values, dtype=dtype, device=x_BCHW.device)
    room = triton.next_power_of_2(values)
    rows = min(triton.next_power_of_2(columns), max(1, TILE // 2 // room))
    tiles = triton.cdiv(columns, rows)
    _patches_kernel[(images * lines * tiles,)](
        x_BCHW,
        out,
        height,
        width,
        *x_BCHW.stride(),
        lines,
        columns,
        tiles,
        CHANNELS=channels,
        SIZE=size,
        STRIDE=stride,
        PADDING=padding,
        VALUES=values,
        ROWS=rows,
        ROOM=room,
    )
    return out.permute(0, 3, 1, 2)


@triton.jit
def _routes_kernel(g, keys, numbers, active, channels, BLOCK: tl.constexpr):  # pragma: no cover
    image = tl.program_id(0)
    number = tl.zeros((BLOCK,), tl.int64)
    count = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, channels, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < channels
        on = tl.load(g + image.to(tl.int64) * channels + column, mask=there, other=0.0) > 0
        number += tl.where(on, tl.load(keys + column, mask=there, other=0), 0)
        count += on.to(tl.int64)
    tl.store(numbers + image, tl.sum(number, axis=0))
    tl.store(active + image, tl.sum(count, axis=0))


def routes(g_BC: Tensor, keys_C: Tensor) -> tuple[Tensor, Tensor]:
    """For each image the sum of its open channels' keys, and their number; in one pass."""
    numbers, active = torch.empty(2, len(g_BC), dtype=torch.int64, device=g_BC.device)
    channels = g_BC.shape[1]
    block = min(1024, triton.next_power_of_2(max(1, channels)))
    _routes_kernel[(len(g_BC),)](g_BC.contiguous(), keys_C, numbers, active, channels, BLOCK=block)
    return numbers, active


def _tile(channels: int) -> tuple[int, int]:
    columns = min(128, triton.next_power_of_2(channels))
    return TILE // columns, columns
