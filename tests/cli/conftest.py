"""A run of the command that many tests look at."""

import shutil
from pathlib import Path

import pytest
from command_line import QUICK, deepmoe


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Of a run whose folder tests leave alone."""
    out = tmp_path_factory.mktemp("cli") / "run"
    result = deepmoe("train", "quickstart", "--out", out, *QUICK)
    assert result.exit_code == 0, result.output
    assert "epoch 4/4 (finetune): loss" in result.output
    assert "accuracy" in result.output
    return out / "last.safetensors"


@pytest.fixture
def copied(checkpoint, tmp_path_factory) -> Path:
    """The checkpoint in a copy of that folder, for a test that may write there."""
    folder = shutil.copytree(checkpoint.parent, tmp_path_factory.mktemp("copied") / "run")
    return Path(folder) / checkpoint.name
