"""Compiled kernels on threads: OpenMP's, a pool of our own, or none."""

import numpy as np
import pytest
import torch

from deepmoe.sparse import threads
from deepmoe.sparse.collect import Collector
from deepmoe.sparse.threads import run_on_threads


@pytest.fixture(params=["openmp", "pool", "one thread"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "one thread" else 2)
    if request.param == "pool":
        monkeypatch.setattr(threads, "_openmp_parallel", lambda: None)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_collected_weights_equal_plain_indexing(kernel: int) -> None:
    collector = Collector()
    for outputs, inputs in ((64, 40), (7, 3), (1, 1)):  # the second reuses the first one's memory
        weight = torch.randn(outputs, inputs, kernel, kernel)
        outs = torch.randperm(outputs)[: -(-outputs // 2)].sort().values
        ins = torch.randperm(inputs)[: -(-inputs // 2)].sort().values
        for rows in (outs, None):
            expected = (weight if rows is None else weight[rows])[:, ins]
            found = collector.collect(weight, rows, ins)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("_threads")
def test_every_piece_is_done_once() -> None:
    from numba import carray, cfunc

    from deepmoe.sparse.numba_kernels import _claim, _longs

    @cfunc("void(voidptr)", nopython=True)
    def mark(block):
        args = carray(block, 3, dtype=np.int64)
        done = carray(_longs(args[2]), args[1])
        while True:
            piece = _claim(block)
            if piece >= args[1]:
                break
            done[piece] += 1

    done = torch.zeros(1000, dtype=torch.int64)
    run_on_threads(mark.ctypes, len(done), [done.data_ptr()])
    assert (done == 1).all()
