"""Runs compiled tasks on PyTorch's own threads.

A second pool of threads, such as Numba's, would fight with PyTorch's for the cores: idle OpenMP
threads keep spinning for a while. So tasks are handed to the OpenMP runtime that PyTorch uses.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

CLAIMS = 3  # of each thread, where pieces are small
Task = Any  # a compiled void(void*), as ctypes calls it
Argument = int | Tensor  # a number, or an array that the task is given the address of


class Runs(Protocol):
    """Runs a task, now or later."""

    def __call__(self, task: Task, pieces: int, arguments: Sequence[Argument]) -> None:
        """Lets threads share the pieces of a task's work."""


def run_on_threads(task: Task, pieces: int, arguments: Sequence[Argument]) -> None:
    """Calls a task on every thread, with one block of memory: next piece, pieces, arguments.

    The task claims pieces of the work from the block until there are none left.
    """
    block = np.array(block_of(pieces, arguments), dtype=np.int64)
    call_on_threads(task, block, min(torch.get_num_threads(), pieces))


def block_of(pieces: int, arguments: Sequence[Argument]) -> list[int]:
    """What a task finds in its block of memory."""
    return [0, pieces, *(a if isinstance(a, int) else a.data_ptr() for a in arguments)]


def some_of(pieces: int) -> int:
    """How many small pieces a thread should claim at a time.

    Threads that claim at the same time wait for each other, so that few claims are better; with a
    few for each, one that is held up leaves its share to the others.
    """
    threads = torch.get_num_threads()
    return pieces if threads == 1 else -(-pieces // (CLAIMS * threads))


def address_of(task: Task) -> int:
    """Where a task's code is, for compiled code that calls it."""
    address = ctypes.cast(task, ctypes.c_void_p).value
    assert address is not None
    return address


def call_on_threads(task: Task, block: np.ndarray, threads: int) -> None:
    """Calls a task with a block of memory on so many threads, if there are as many."""
    data, parallel = ctypes.c_void_p(block.ctypes.data), _openmp_parallel()
    if threads <= 1:
        task(data)
    elif parallel is not None:
        parallel(task, data, threads, 0)
    else:
        list(_pool(threads).map(task, [data] * threads))


@cache
def _openmp_parallel() -> Any:
    """GNU OpenMP's entry point in the runtime that PyTorch has loaded, if it is that one."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)
