"""Machine code that runs tasks one after the other, on threads that wait for each other between."""

# mypy: ignore-errors

import ctypes
from functools import cache

from llvmlite import ir

from deepmoe.sparse.llvm_code import INT, INTS, Code, machine

SPINS = 64  # looks at the progress of others before the core is offered to someone else


@cache
def chain_kernel():
    """A function for threads: runs all tasks of a list, each with its block of memory.

    However many threads call it, each task ends before the next one begins. A thread that comes to
    a task says so before it claims pieces, and again when there are none left. So once it finds
    none left, and all that came have left, the task is done; whoever comes later finds nothing to
    do. Nobody waits for a thread that has not come, so that one alone is enough.

    Arguments: tasks; addresses of the tasks' functions, of their blocks, and of the numbers of
    threads that have come to, and left, each task, which are zero at first.
    """
    code = Code(machine().lanes)
    b = code.builder
    tasks = code.argument(0)
    functions, blocks, come, left = (code.address(i, INTS) for i in range(1, 5))
    task_type = ir.FunctionType(ir.VoidType(), [INTS]).as_pointer()
    give_way = b.inttoptr(INT(_give_way()), ir.FunctionType(ir.IntType(32), []).as_pointer())
    first, run, wait, again, yielding, following, done = (
        code.label(n) for n in ("first", "run", "wait", "again", "yield", "following", "done")
    )
    b.branch(first)
    b.position_at_end(first)
    number = b.phi(INT)
    number.add_incoming(INT(0), b.function.entry_basic_block)
    b.cbranch(b.icmp_signed("<", number, tasks), run, done)

    b.position_at_end(run)
    function = b.inttoptr(code.load(functions, number), task_type)
    block = b.inttoptr(code.load(blocks, number), INTS)
    came, went = (b.gep(counts, [number]) for counts in (come, left))
    b.atomic_rmw("add", came, INT(1), "seq_cst")
    b.call(function, [block])
    b.atomic_rmw("add", went, INT(1), "seq_cst")
    b.branch(wait)

    b.position_at_end(wait)
    looks = b.phi(INT)
    looks.add_incoming(INT(0), run)
    # In this order: whoever comes in between is late, and claims nothing.
    gone = b.load_atomic(went, "seq_cst", 8)
    there = b.load_atomic(came, "seq_cst", 8)
    b.cbranch(b.icmp_signed("<", gone, there), again, following)

    b.position_at_end(again)
    more = b.add(looks, INT(1))
    b.cbranch(b.icmp_signed("<", more, INT(SPINS)), wait, yielding)
    looks.add_incoming(more, again)
    b.position_at_end(yielding)
    b.call(give_way, [])
    b.branch(wait)
    looks.add_incoming(INT(0), yielding)

    b.position_at_end(following)
    number.add_incoming(b.add(number, INT(1)), following)
    b.branch(first)
    b.position_at_end(done)
    b.ret_void()
    return code.compiled()


def _give_way() -> int:
    """The address of what lets another thread have the core."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
