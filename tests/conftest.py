import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ["DEEPMOE_PROGRESS"] = "0"  # a test that is slow today says no more than a quick one

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores, and so does what they start
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own; networks are so small that threads would wait for each other."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
