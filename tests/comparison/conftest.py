"""A small comparison that many tests look at."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from small_comparison import METHODS, SETTINGS, run

from deepmoe.config import config_to_toml


@pytest.fixture(scope="session")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preset") / "tiny.toml"
    path.write_text(config_to_toml(tiny_config(*SETTINGS)))
    return path


@pytest.fixture(scope="session")
def compared(preset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of three methods, at one cost; tests leave it alone."""
    out = tmp_path_factory.mktemp("compared")
    options = ("--macs", "0.6", "--out", out, "--latency-images", 3)
    with pytest.MonkeyPatch.context() as patch:  # processes of its own, with as many threads
        patch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        result = run(*METHODS, "--preset", preset, *options)
    assert result.exit_code == 0, result.output
    (out / "told.txt").write_text(result.stderr)
    return out


@pytest.fixture
def copied(compared: Path, tmp_path: Path) -> Path:
    """A copy of that folder, for a test that writes there."""
    return Path(shutil.copytree(compared, tmp_path / "copied"))
