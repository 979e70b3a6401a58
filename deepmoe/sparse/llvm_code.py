"""Tasks for `run_on_threads` as LLVM code, where Numba would not keep sums in registers."""

# mypy: ignore-errors

import ctypes
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

INT, SHORT, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
INTS, FLOATS = INT.as_pointer(), FLOAT.as_pointer()


class Machine(NamedTuple):
    """The vectors of a processor."""

    lanes: int  # floats in one
    registers: int


@cache
def machine() -> Machine:
    """What the processor at hand has."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Machine(16, 32)
    return Machine(8, 16) if features.get("avx2") else Machine(4, 32)


class Code:
    """LLVM code of one task, and the few operations that it is made of."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.vector = ir.VectorType(FLOAT, lanes)
        self.zero = ir.Constant(self.vector, [0.0] * lanes)
        self.module = ir.Module("task")
        self.module.triple = llvm.get_default_triple()
        void = ir.VoidType()
        self.function = ir.Function(self.module, ir.FunctionType(void, [INTS]), "task")
        self.block = self.function.args[0]
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._fma = self._intrinsic(self.vector, [self.vector] * 3, f"llvm.fma.v{lanes}f32")
        self._fetch = self._intrinsic(void, [FLOATS, SHORT, SHORT, SHORT], "llvm.prefetch.p0")

    def _intrinsic(self, result, arguments, name):
        return ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def label(self, name):
        return self.function.append_basic_block(name)

    def argument(self, number):
        return self.load(self.block, INT(number))

    def address(self, number, kind):
        return self.builder.inttoptr(self.argument(number), kind)

    def load(self, array, index):
        return self.builder.load(self.builder.gep(array, [index]))

    def least(self, left, right):
        smaller = self.builder.icmp_signed("<", left, right)
        return self.builder.select(smaller, left, right)

    def splat(self, value):
        undefined = ir.Constant(self.vector, ir.Undefined)
        alone = self.builder.insert_element(undefined, value, SHORT(0))
        everywhere = ir.Constant(ir.VectorType(SHORT, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(alone, undefined, everywhere)

    def fma(self, left, right, plus):
        return self.builder.call(self._fma, [left, right, plus])

    def fetch(self, address):
        """Asks for a cache line before it is needed."""
        self.builder.call(self._fetch, [address, SHORT(0), SHORT(3), SHORT(1)])

    def _nth(self, array, number):
        at = self.builder.gep(array, [INT(number * self.lanes)])
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
