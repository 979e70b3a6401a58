import os

import pytest
import torch

os.environ["DEEPMOE_PROGRESS"] = "0"  # a test that is slow today says no more than a quick one

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
