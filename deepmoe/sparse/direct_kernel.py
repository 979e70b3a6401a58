"""Machine code of the direct convolution, made for the vectors of the machine at hand.

A tile of outputs times vectors of positions stays in registers while all inputs pass by. Numba
would not keep it there, so that the code is written out as LLVM's.
"""

# mypy: ignore-errors

import ctypes
from functools import cache
from itertools import chain
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

AHEAD = 2  # how many inputs ahead weights are fetched

_INT, _FLOAT, _HINT = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_INTS, _FLOATS = _INT.as_pointer(), _FLOAT.as_pointer()


class Tile(NamedTuple):
    """What is summed up in registers at a time."""

    vectors: int  # of positions
    outputs: int
    cost: float  # of the same work, against other tiles


class Machine(NamedTuple):
    """How wide a vector is, and which tiles fit into the registers."""

    lanes: int
    tiles: tuple[Tile, ...]


@cache
def machine() -> Machine:
    """What the processor at hand can do."""
    features = llvm.get_host_cpu_features()
    many_registers = (Tile(3, 8, 1.0), Tile(5, 5, 1.05), Tile(4, 6, 1.1), Tile(2, 12, 1.25))
    few_outputs = Tile(2, 1, 4.0)
    if features.get("avx512f"):
        return Machine(16, (*many_registers, few_outputs))
    if features.get("avx2"):
        return Machine(8, (Tile(3, 4, 1.0), Tile(2, 6, 1.1), Tile(4, 2, 1.25), few_outputs))
    return Machine(4, (*many_registers, few_outputs))


@cache
def direct_kernel(taps: int, tile: Tile, onto: bool):
    """A task for `run_on_threads`: relu(inputs times weights + bias) * gate, for one image.

    Arguments: inputs, outputs, vectors of positions; by how much to divide a piece's number and of
    what to take the rest, for its block of outputs, and the same for its group of positions;
    addresses of x (inputs, planes), weights (all outputs, all inputs, taps), bias of all outputs,
    gate of each output, out (outputs, positions), values to add before the ReLU; of the number of
    each output, of each input, and the place of each tap in a plane; floats of a row of weights,
    from one plane of x to the next, of out, of the values; the least sum, as the bits of a float.

    Args:
        taps: of the kernel.
        tile: what is summed up at a time; there must be as many outputs and vectors.
        onto: whether there are values to add.
    """
    code = _Code(machine().lanes)
    b, vectors, outputs = code.builder, tile.vectors, tile.outputs
    pieces, inputs, n_outputs, n_vectors, *order = (code.argument(i) for i in range(1, 9))
    x, weights, bias, gate, out, values = (code.address(i, _FLOATS) for i in range(9, 15))
    numbers, channels, tap_places = (code.address(i, _INTS) for i in range(15, 18))
    row, x_step, out_step, values_step = (code.argument(i) for i in range(18, 22))
    least = code.splat(b.bitcast(b.trunc(code.argument(22), _HINT), _FLOAT))

    claim, work, sum_up, store, done = (
        code.label(n) for n in ("claim", "work", "sum", "out", "end")
    )
    b.branch(claim)
    b.position_at_end(claim)
    piece = b.atomic_rmw("add", code.block, _INT(1), "monotonic")
    b.cbranch(b.icmp_signed("<", piece, pieces), work, done)

    b.position_at_end(work)
    # The last tile of either side starts early rather than being a smaller one.
    first, start = (
        code.least(b.mul(b.srem(b.sdiv(piece, by), among), _INT(size)), b.sub(all_, _INT(size)))
        for by, among, size, all_ in (
            (order[0], order[1], outputs, n_outputs),
            (order[2], order[3], vectors, n_vectors),
        )
    )
    start = b.mul(start, _INT(code.lanes))
    mine = [b.add(first, _INT(o)) for o in range(outputs)]
    number = [code.load(numbers, o) for o in mine]
    rows = [b.gep(weights, [b.mul(n, row)]) for n in number]
    shifts = [code.load(tap_places, _INT(t)) for t in range(taps)]
    x = b.gep(x, [start])
    b.branch(sum_up)

    b.position_at_end(sum_up)
    c = b.phi(_INT)
    c.add_incoming(_INT(0), work)
    sums = [[b.phi(code.vector) for _ in range(vectors)] for _ in range(outputs)]
    plane = b.gep(x, [b.mul(c, x_step)])
    place = b.mul(code.load(channels, c), _INT(taps))
    if taps > 1:  # a processor foresees rows that are read from end to end
        later = code.least(b.add(c, _INT(AHEAD)), b.sub(inputs, _INT(1)))
        later = b.mul(code.load(channels, later), _INT(taps))
        for w in rows:
            code.fetch(b.gep(w, [later]))
    added = [list(of_output) for of_output in sums]
    for t in range(taps):
        at = b.gep(plane, [shifts[t]])
        xs = [code.load_vector(at, v) for v in range(vectors)]
        for o in range(outputs):
            w = code.splat(code.load(b.gep(rows[o], [place]), _INT(t)))
            added[o] = [code.fma(xs[v], w, added[o][v]) for v in range(vectors)]
    following = b.add(c, _INT(1))
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
    b.branch(claim)
    b.position_at_end(done)
    b.ret_void()
    return code.compiled()


class _Code:
    """LLVM code of one task, and the few operations that it is made of."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.vector = ir.VectorType(_FLOAT, lanes)
        self.zero = ir.Constant(self.vector, [0.0] * lanes)
        self.module = ir.Module("task")
        self.module.triple = llvm.get_default_triple()
        void = ir.VoidType()
        self.function = ir.Function(self.module, ir.FunctionType(void, [_INTS]), "task")
        self.block = self.function.args[0]
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._fma = self._intrinsic(self.vector, [self.vector] * 3, f"llvm.fma.v{lanes}f32")
        self._fetch = self._intrinsic(void, [_FLOATS, _HINT, _HINT, _HINT], "llvm.prefetch.p0")

    def _intrinsic(self, result, arguments, name):
        return ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def label(self, name):
        return self.function.append_basic_block(name)

    def argument(self, number):
        return self.load(self.block, _INT(number))

    def address(self, number, kind):
        return self.builder.inttoptr(self.argument(number), kind)

    def load(self, array, index):
        return self.builder.load(self.builder.gep(array, [index]))

    def least(self, left, right):
        smaller = self.builder.icmp_signed("<", left, right)
        return self.builder.select(smaller, left, right)

    def splat(self, value):
        undefined = ir.Constant(self.vector, ir.Undefined)
        alone = self.builder.insert_element(undefined, value, _HINT(0))
        everywhere = ir.Constant(ir.VectorType(_HINT, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(alone, undefined, everywhere)

    def fma(self, left, right, plus):
        return self.builder.call(self._fma, [left, right, plus])

    def fetch(self, address):
        """Asks for a cache line before it is needed."""
        self.builder.call(self._fetch, [address, _HINT(0), _HINT(3), _HINT(1)])

    def _nth(self, array, number):
        at = self.builder.gep(array, [_INT(number * self.lanes)])
        return self.builder.bitcast(at, self.vector.as_pointer())

    def load_vector(self, array, number):
        return self.builder.load(self._nth(array, number), align=4)

    def store_vector(self, value, array, number):
        self.builder.store(value, self._nth(array, number), align=4)

    def compiled(self):
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        # LLVM would take half of a vector on processors that once slowed down for whole ones.
        features = llvm.get_host_cpu_features().flatten() + (
            ",-prefer-256-bit" * (self.lanes == 16)
        )
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, opt=3
        )
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(self.module)), target)
        engine.finalize_object()
        task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("task"))
        task.engine = engine  # its memory holds the code
        return task
