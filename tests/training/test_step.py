"""What a training step computes, and as one CUDA graph against the same kernel by kernel."""

from pathlib import Path

import pytest
import torch
from helpers import tiny_config

from deepmoe.config import RunConfig
from deepmoe.data import DataInfo
from deepmoe.losses import DeepMoELoss
from deepmoe.model import DeepMoE
from deepmoe.training import fit
from deepmoe.training.model_and_optimizer import make_model
from deepmoe.training.step import Objective
from deepmoe.training.teachers import Teachers

INFO = DataInfo(tuple("0123456789"), (8, 8), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.arange(6)


def model_of(config: RunConfig) -> DeepMoE:
    return make_model(config, INFO, torch.device("cpu")).eval()


def test_no_random_number_is_drawn(digits) -> None:
    objective, nothing = Objective(model_of(tiny_config()), DeepMoELoss()), torch.zeros(())
    torch.manual_seed(3)
    objective(nothing, nothing, *digits)
    drawn = torch.rand(())
    torch.manual_seed(3)
    assert torch.rand(()) == drawn


def test_several_teachers_answer_with_the_mean_of_their_logits(digits) -> None:
    teachers = [model_of(tiny_config(f"train.seed={seed}")) for seed in (1, 2)]
    together = Teachers(teachers)(digits[0])
    logits = [teacher(digits[0]).logits for teacher in teachers]
    assert not torch.allclose(*logits)
    torch.testing.assert_close(together, (logits[0] + logits[1]) / 2)
    assert not together.requires_grad


@needs_cuda
@pytest.mark.parametrize("settings", [(), ("train.target_macs=0.6",)])
def test_captured_steps_train_as_plain_ones(tmp_path: Path, settings: tuple[str, ...]) -> None:
    weights = {}
    for graphs in ("auto", "off"):
        config = tiny_config(
            "train.batch_size=64",
            "train.device=cuda",
            "train.precision=64-true",
            "train.compile=off",
            # A captured learning rate is held in single precision: one that fits exactly.
            "train.schedule=constant",
            "train.lr=0.125",
            f"train.cuda_graphs={graphs}",
            *settings,
        )
        result = fit(config, tmp_path / graphs, quiet=True)
        weights[graphs] = result.model.state_dict()
    for name, captured in weights["auto"].items():
        torch.testing.assert_close(captured, weights["off"][name], rtol=1e-4, atol=1e-4, msg=name)
