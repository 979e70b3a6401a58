import os

import pytest
import torch

from deepmoe import progress

progress.EVERY = 3600.0  # a test that is slow today has no other output than a quick one

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
