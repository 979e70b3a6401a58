"""Machine code of the direct convolution, made for the vectors of the machine at hand.

A tile of outputs times vectors of positions stays in registers while all inputs pass by. Numba
would not keep it there.
"""

# mypy: ignore-errors

from functools import cache
from itertools import chain
from typing import NamedTuple

from deepmoe.sparse.llvm_code import FLOAT, FLOATS, INT, INTS, SHORT, Code, machine

AHEAD = 4  # how many inputs ahead weights are fetched


class Tile(NamedTuple):
    """What is summed up in registers at a time."""

    vectors: int  # of positions
    outputs: int
    cost: float  # of the same work, against other tiles


@cache
def tiles() -> tuple[Tile, ...]:
    """Those that fit into the registers of the processor at hand."""
    few = Tile(1, 1, 6.0)
    if machine().registers < 32:
        return Tile(3, 4, 1.0), Tile(2, 6, 1.1), Tile(4, 2, 1.25), Tile(1, 8, 1.5), few
    four = Tile(3, 8, 1.0), Tile(5, 5, 1.05), Tile(4, 6, 1.1), Tile(2, 12, 1.25)
    return *four, Tile(1, 8, 1.5), few


@cache
def direct_kernel(taps: int, tile: Tile, onto: bool):
    """A task for `run_on_threads`: relu(inputs times weights + bias) * gate, for one image.

    Arguments: inputs, outputs, vectors of positions; by how much to divide a piece's number and of
    what to take the rest, for its block of outputs, and the same for its group of positions;
    addresses of x (inputs, planes), weights (all outputs, all inputs, taps), bias of all outputs,
    gate of each output, out (outputs, positions), values to add before the ReLU; of the number of
    each output, of each input, and the place of each tap in a plane; floats of a row of weights,
    from one plane of x to the next, of out, of the values; the least sum, as the bits of a float;
    pieces to claim at a time.

    Args:
        taps: of the kernel.
        tile: what is summed up at a time; there must be as many outputs and vectors.
        onto: whether there are values to add.
    """
    code = Code(machine().lanes)
    b, vectors, outputs = code.builder, tile.vectors, tile.outputs
    pieces, inputs, n_outputs, n_vectors, *order = (code.argument(i) for i in range(1, 9))
    x, weights, bias, gate, out, values = (code.address(i, FLOATS) for i in range(9, 15))
    numbers, channels, tap_places = (code.address(i, INTS) for i in range(15, 18))
    row, x_step, out_step, values_step = (code.argument(i) for i in range(18, 22))
    least = code.splat(b.bitcast(b.trunc(code.argument(22), SHORT), FLOAT))

    some = code.argument(23)

    claim, begin, work, sum_up, store, done = (
        code.label(n) for n in ("claim", "begin", "work", "sum", "out", "end")
    )
    b.branch(claim)
    b.position_at_end(claim)
    claimed = b.atomic_rmw("add", code.block, some, "monotonic")
    b.cbranch(b.icmp_signed("<", claimed, pieces), begin, done)

    b.position_at_end(begin)
    behind = code.least(b.add(claimed, some), pieces)
    b.branch(work)

    b.position_at_end(work)
    piece = b.phi(INT)
    piece.add_incoming(claimed, begin)
    # The last tile of either side starts early rather than being a smaller one.
    first, start = (
        code.least(b.mul(b.srem(b.sdiv(piece, by), among), INT(size)), b.sub(all_, INT(size)))
        for by, among, size, all_ in (
            (order[0], order[1], outputs, n_outputs),
            (order[2], order[3], vectors, n_vectors),
        )
    )
    start = b.mul(start, INT(code.lanes))
    mine = [b.add(first, INT(o)) for o in range(outputs)]
    number = [code.load(numbers, o) for o in mine]
    rows = [b.gep(weights, [b.mul(n, row)]) for n in number]
    shifts = [code.load(tap_places, INT(t)) for t in range(taps)]
    x = b.gep(x, [start])
    b.branch(sum_up)

    b.position_at_end(sum_up)
    c = b.phi(INT)
    c.add_incoming(INT(0), work)
    sums = [[b.phi(code.vector) for _ in range(vectors)] for _ in range(outputs)]
    plane = b.gep(x, [b.mul(c, x_step)])
    place = b.mul(code.load(channels, c), INT(taps))
    if taps > 1:  # a processor foresees rows that are read from end to end
        later = code.least(b.add(c, INT(AHEAD)), b.sub(inputs, INT(1)))
        later = b.mul(code.load(channels, later), INT(taps))
        for w in rows:
            code.fetch(b.gep(w, [later]))
    added = [list(of_output) for of_output in sums]
    for t in range(taps):
        at = b.gep(plane, [shifts[t]])
        xs = [code.load_vector(at, v) for v in range(vectors)]
        for o in range(outputs):
            w = code.splat(code.load(b.gep(rows[o], [place]), INT(t)))
            added[o] = [code.fma(xs[v], w, added[o][v]) for v in range(vectors)]
    following = b.add(c, INT(1))
    c.add_incoming(following, sum_up)
    for before, after in zip(chain(*sums), chain(*added), strict=True):
        before.add_incoming(code.zero, work)
        before.add_incoming(after, sum_up)
    b.cbranch(b.icmp_signed("<", following, inputs), sum_up, store)

    b.position_at_end(store)
    for o in range(outputs):
        plus, times = code.splat(code.load(bias, number[o])), code.splat(code.load(gate, mine[o]))
        to = b.gep(out, [b.add(b.mul(mine[o], out_step), start)])
        other = b.gep(values, [b.add(b.mul(mine[o], values_step), start)])
        for v in range(vectors):
            y = b.fadd(added[o][v], plus)
            y = b.fadd(y, code.load_vector(other, v)) if onto else y
            y = b.select(b.fcmp_ordered("<", y, least), least, y)
            code.store_vector(b.fmul(y, times), to, v)
    next_piece = b.add(piece, INT(1))
    piece.add_incoming(next_piece, store)
    b.cbranch(b.icmp_signed("<", next_piece, behind), work, claim)
    b.position_at_end(done)
    b.ret_void()
    return code.compiled()
