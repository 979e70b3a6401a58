"""CPU kernels that PyTorch has no operator for. Imported on first use: Numba is slow to import.

A convolution over few positions is bound by reading its weights, so copying the active ones first
would double the work. `stream` reads them where they lie, the rows of active inputs only, and
multiplies them by the inputs that are not zero.

Each kernel is a task for `run_on_threads`: its one argument is a block of integers that holds the
next piece of work, the number of pieces, and sizes and addresses of arrays.
"""

# mypy: ignore-errors

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

GROUP = 8  # rows that are added at once, so that sums are loaded and stored less often
CHUNK = 16  # input channels whose rows should stay in the cache while positions pass over them
ROWS = 8  # output channels that one piece of `collect` copies


@intrinsic
def _claim_some(typing_context, block, count):
    """The number of the next piece; that many from it on are this thread's alone."""

    def code(context, builder, signature, arguments):
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "monotonic")

    return types.int64(types.voidptr, types.int64), code


@njit(inline="always")
def _claim(block):
    """The number of the next piece; no other thread gets the same."""
    return _claim_some(block, 1)


def _pointer_to(dtype):
    @intrinsic
    def pointer(typing_context, address):
        def code(context, builder, signature, arguments):
            to = context.get_value_type(signature.return_type)
            return builder.inttoptr(arguments[0], to)

        return types.CPointer(dtype)(types.int64), code

    return pointer


_floats, _integers, _longs = (
    _pointer_to(dtype) for dtype in (types.float32, types.int32, types.int64)
)


@njit(inline="always")
def _larger(one, other):
    return other if other > one or other != other else one


@cfunc("void(voidptr)", cache=True, nopython=True)
def collect(block):
    """out[r, k, c] = source[rows[r], columns[c], k], of a source (outputs, inputs, taps).

    Arguments: inputs, taps, number of rows, of columns; source, rows, columns, out.
    """
    args = carray(block, 10, dtype=np.int64)
    inputs, taps, n_rows, n_columns = args[2], args[3], args[4], args[5]
    source = carray(_floats(args[6]), 1)
    rows = carray(_longs(args[7]), n_rows)
    columns = carray(_longs(args[8]), n_columns)
    out = carray(_floats(args[9]), (n_rows, taps * n_columns))
    while True:
        piece = _claim(block)
        if piece >= args[1]:
            break
        for r in range(piece * ROWS, min((piece + 1) * ROWS, n_rows)):
            start = rows[r] * inputs * taps
            to = out[r]
            if taps == 9:  # a constant lets the compiler copy by vectors
                for c in range(n_columns):
                    at = start + columns[c] * 9
                    for k in range(9):
                        to[c + k * n_columns] = source[at + k]
            else:
                for c in range(n_columns):
                    at = start + columns[c] * taps
                    for k in range(taps):
                        to[c + k * n_columns] = source[at + k]


@cfunc("void(voidptr)", cache=True, nopython=True)
def list_inputs(block):
    """For each position and chunk of channels, the inputs that are not zero and their weight rows.

    Arguments: height, width, channels, kernel height, kernel width, stride, padding, dilation,
    width of the output, chunks, room of a list; x (H, W, C), number of each channel among all
    inputs, and to be filled: values and rows (positions, chunks, room), counts (positions, chunks).
    """
    args = carray(block, 18, dtype=np.int64)
    height, width, channels = args[2], args[3], args[4]
    kernel_height, kernel_width = args[5], args[6]
    stride, padding, dilation, out_width = args[7], args[8], args[9], args[10]
    chunks, room = args[11], args[12]
    x = carray(_floats(args[13]), (height, width, channels))
    numbers = carray(_longs(args[14]), channels)
    values = carray(_floats(args[15]), (args[1], chunks, room))
    rows = carray(_integers(args[16]), (args[1], chunks, room))
    counts = carray(_integers(args[17]), (args[1], chunks))
    taps = kernel_height * kernel_width
    while True:
        position = _claim(block)
        if position >= args[1]:
            break
        top = (position // out_width) * stride - padding
        left = (position % out_width) * stride - padding
        for chunk in range(chunks):
            value, row = values[position, chunk], rows[position, chunk]
            first, last = chunk * CHUNK, min((chunk + 1) * CHUNK, channels)
            n = 0
            for ky in range(kernel_height):
                h = top + ky * dilation
                if h < 0 or h >= height:
                    continue
                for kx in range(kernel_width):
                    w = left + kx * dilation
                    if w < 0 or w >= width:
                        continue
                    tap = ky * kernel_width + kx
                    for c in range(first, last):
                        v = x[h, w, c]
                        # Written in any case, and kept by counting on: no branch to guess wrong.
                        value[n] = v
                        row[n] = numbers[c] * taps + tap
                        n += v != 0
            while n % GROUP:
                value[n] = 0
                row[n] = row[0]
                n += 1
            counts[position, chunk] = n


@cfunc("void(voidptr)", cache=True, nopython=True, fastmath={"contract", "reassoc", "nsz"})
def stream(block):
    """Sums weight rows times inputs, as `list_inputs` has listed them, for a block of outputs.

    Arguments: positions, chunks, room of a list, weight rows, outputs of a block; weights (blocks,
    rows, outputs), values, rows, counts, and to be filled: sums (blocks, positions, outputs).
    """
    args = carray(block, 12, dtype=np.int64)
    positions, chunks, room, n_rows, width = args[2], args[3], args[4], args[5], args[6]
    all_weights = carray(_floats(args[7]), (args[1], n_rows, width))
    values = carray(_floats(args[8]), (positions, chunks, room))
    rows = carray(_integers(args[9]), (positions, chunks, room))
    counts = carray(_integers(args[10]), (positions, chunks))
    all_sums = carray(_floats(args[11]), (args[1], positions, width))
    while True:
        piece = _claim(block)
        if piece >= args[1]:
            break
        weights, sums = all_weights[piece], all_sums[piece]
        sums[:] = 0
        for chunk in range(chunks):
            for position in range(positions):
                s, v, r = sums[position], values[position, chunk], rows[position, chunk]
                for n in range(0, counts[position, chunk], GROUP):
                    v0, v1, v2, v3 = v[n], v[n + 1], v[n + 2], v[n + 3]
                    v4, v5, v6, v7 = v[n + 4], v[n + 5], v[n + 6], v[n + 7]
                    r0, r1 = weights[r[n]], weights[r[n + 1]]
                    r2, r3 = weights[r[n + 2]], weights[r[n + 3]]
                    r4, r5 = weights[r[n + 4]], weights[r[n + 5]]
                    r6, r7 = weights[r[n + 6]], weights[r[n + 7]]
                    for o in range(width):
                        low = (v0 * r0[o] + v1 * r1[o]) + (v2 * r2[o] + v3 * r3[o])
                        high = (v4 * r4[o] + v5 * r5[o]) + (v6 * r6[o] + v7 * r7[o])
                        s[o] += low + high


@cfunc("void(voidptr)", cache=True, nopython=True)
def finish(block):
    """What `stream` has summed up, of active outputs: relu(sum + bias) * gate.

    Arguments: outputs, positions, outputs of a block; sums (blocks, positions, outputs), the number
    of each output, bias of all outputs, gate of each output, and to be filled: y (outputs,
    positions); whether there is a ReLU.
    """
    args = carray(block, 11, dtype=np.int64)
    outputs, positions, width = args[2], args[3], args[4]
    sums = carray(_floats(args[5]), 1)
    numbers = carray(_longs(args[6]), outputs)
    bias = carray(_floats(args[7]), 1)
    gate = carray(_floats(args[8]), outputs)
    y = carray(_floats(args[9]), (outputs, positions))
    least = np.float32(0.0) if args[10] else np.float32(-np.inf)
    while True:
        piece = _claim(block)
        if piece >= args[1]:
            break
        for o in range(piece * outputs // args[1], (piece + 1) * outputs // args[1]):
            number = numbers[o]
            start = (number // width) * positions * width + number % width
            for p in range(positions):
                v = sums[start + p * width] + bias[number]
                y[o, p] = (least if v < least else v) * gate[o]


@cfunc("void(voidptr)", cache=True, nopython=True)
def arrange(block):
    """out[c, i] = x[c, places[i]], or zero where a place is negative.

    Arguments: places, from one channel of x to the next, channels to claim at a time; x, places,
    out.
    """
    args = carray(block, 8, dtype=np.int64)
    count, step, some = args[2], args[3], args[4]
    x = carray(_floats(args[5]), 1)
    places = carray(_integers(args[6]), count)
    out = carray(_floats(args[7]), (args[1], count))
    while True:
        first = _claim_some(block, some)
        if first >= args[1]:
            break
        for c in range(first, min(first + some, args[1])):
            start = c * step
            to = out[c]
            for i in range(count):
                place = places[i]
                value = x[start + max(place, 0)]
                to[i] = value if place >= 0 else np.float32(0.0)


@cfunc("void(voidptr)", cache=True, nopython=True)
def channels_last(block):
    """out[y, x, c] = planes[c, y, x], a row of positions at a time.

    Arguments: channels, width, from one plane to the next, from one row to the next; planes, out.
    """
    args = carray(block, 8, dtype=np.int64)
    channels, width, step, row = args[2], args[3], args[4], args[5]
    planes = carray(_floats(args[6]), 1)
    out = carray(_floats(args[7]), (args[1], width, channels))
    while True:
        y = _claim(block)
        if y >= args[1]:
            break
        for x in range(width):
            to = out[y, x]
            for c in range(channels):
                to[c] = planes[c * step + y * row + x]


@cfunc("void(voidptr)", cache=True, nopython=True)
def max_pool(block):
    """The maxima of squares, a plane at a time; not a number where one of the values is none.

    Arguments: side of the squares, from one to the next, height and width of the output, from one
    plane of x to the next, from one row to the next, planes to claim at a time; x, out.
    """
    args = carray(block, 11, dtype=np.int64)
    size, stride, height, width, step, row = args[2], args[3], args[4], args[5], args[6], args[7]
    some = args[8]
    x = carray(_floats(args[9]), 1)
    out = carray(_floats(args[10]), (args[1] * height, width))
    while True:
        first = _claim_some(block, some)
        if first >= args[1]:
            break
        for line in range(first * height, min(first + some, args[1]) * height):
            start = line // height * step + line % height * stride * row
            to = out[line]
            if size == 2 and stride == 2:  # constants let the compiler take vectors
                for j in range(width):
                    at = start + 2 * j
                    top = _larger(x[at], x[at + 1])
                    to[j] = _larger(top, _larger(x[at + row], x[at + row + 1]))
                continue
            for j in range(width):
                most = np.float32(-np.inf)
                for k in range(size):
                    for n in range(size):
                        most = _larger(most, x[start + k * row + j * stride + n])
                to[j] = most
