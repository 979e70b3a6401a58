"""A run that others are compared with; tests leave its folder alone."""

import pytest
from helpers import tiny_config
from small_runs import run

from deepmoe.training import FitResult


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory) -> FitResult:
    return run(tiny_config(), tmp_path_factory.mktemp("runs") / "whole")
