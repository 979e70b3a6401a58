"""The training step as one CUDA graph against the same launched kernel by kernel."""

from pathlib import Path

import pytest
import torch
from helpers import tiny_config

from deepmoe.training import fit

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("target", [None, 0.6])
def test_captured_steps_train_as_plain_ones(tmp_path: Path, target: float | None) -> None:
    weights = {}
    for graphs in ("auto", "off"):
        config = tiny_config(
            "train.batch_size=64",
            "train.device=cuda",
            "train.precision=64-true",
            "train.compile=off",
            f"train.cuda_graphs={graphs}",
            *([f"train.target_macs={target}"] if target else []),
        )
        result = fit(config, tmp_path / graphs, quiet=True)
        weights[graphs] = result.model.state_dict()
    # A captured learning rate is held in single precision.
    for name, captured in weights["auto"].items():
        torch.testing.assert_close(captured, weights["off"][name], rtol=1e-4, atol=1e-4, msg=name)
