"""Runs compiled tasks on PyTorch's own threads.

A second pool of threads, such as Numba's, would fight with PyTorch's for the cores: idle OpenMP
threads keep spinning for a while. So tasks are handed to the OpenMP runtime that PyTorch uses.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

Task = Any  # a compiled void(void*), as ctypes calls it


def run_on_threads(task: Task, pieces: int, arguments: Sequence[int]) -> None:
    """Calls a task on every thread, with one block of memory: next piece, pieces, arguments.

    The task claims pieces of the work from the block until there are none left.
    """
    block = np.array([0, pieces, *arguments], dtype=np.int64)
    data, threads = ctypes.c_void_p(block.ctypes.data), min(torch.get_num_threads(), pieces)
    parallel = _openmp_parallel()
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
