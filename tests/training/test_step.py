"""What a training step computes, and as one CUDA graph against the same kernel by kernel."""

from pathlib import Path

import pytest
import torch
from helpers import tiny_config

from deepmoe.config import RunConfig
from deepmoe.losses import DeepMoELoss
from deepmoe.model import DeepMoE
from deepmoe.training import fit
from deepmoe.training.step import Objective, Teacher
from deepmoe.training.trainer import make_model

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.arange(6)


def model_of(config: RunConfig) -> DeepMoE:
    return make_model(config, 10, torch.device("cpu")).eval()


def test_mixed_images_stand_for_both_labels(digits) -> None:
    x_BCHW, labels = digits
    model, loss = model_of(tiny_config()), DeepMoELoss()
    nothing, one = torch.zeros(()), torch.ones(())
    torch.manual_seed(3)
    total, figures, _ = Objective(model, loss, mixup=0.4)(x_BCHW, labels, nothing, one)
    torch.manual_seed(3)
    share = 0.4 * torch.rand(())
    assert 0 < share < 0.4
    output = model((1 - share) * x_BCHW + share * x_BCHW.flip(0))
    both = [
        torch.nn.functional.cross_entropy(logits, of)
        for of in (labels, labels.flip(0))
        for logits in (output.logits, output.embedding_logits)
    ]
    expected = (1 - share) * (both[0] + both[1]) + share * (both[2] + both[3])
    torch.testing.assert_close(total, expected)
    assert figures[-3] == (output.logits.argmax(dim=1) == labels).sum()


def test_gates_below_a_random_threshold_are_closed(digits) -> None:
    x_BCHW, labels = digits
    model, loss = model_of(tiny_config("heads.init=normal(1, 0.5)")), DeepMoELoss()
    nothing = torch.zeros(())
    torch.manual_seed(0)
    total, _, gates = Objective(model, loss, threshold=2.0)(x_BCHW, labels, nothing, nothing)
    torch.manual_seed(0)
    level = 2.0 * torch.rand(())
    routed, _ = model.route(x_BCHW)
    assert gates is not None and routed is not None and 0.9 < level < 1.1
    for g, whole in zip(gates, routed, strict=True):
        small = whole < level * whole[whole > 0].mean()
        assert small.any() and not small.all()
        torch.testing.assert_close(g, whole.masked_fill(small, 0.0))
    logits = model.backbone(x_BCHW, gates)
    torch.testing.assert_close(total, torch.nn.functional.cross_entropy(logits, labels))


def test_a_network_without_gates_has_none_to_close(digits) -> None:
    model, one = model_of(tiny_config("model.gates=none")), torch.ones(())
    objectives = [Objective(model, DeepMoELoss(), threshold=t) for t in (0.0, 2.0)]
    (total, _, _), (other, _, gates) = (objective(*digits, one, one) for objective in objectives)
    assert gates is None and total == other


def test_without_mixing_no_random_number_is_drawn(digits) -> None:
    objective, nothing = Objective(model_of(tiny_config()), DeepMoELoss()), torch.zeros(())
    torch.manual_seed(3)
    objective(*digits, nothing, nothing)
    drawn = torch.rand(())
    torch.manual_seed(3)
    assert torch.rand(()) == drawn


def test_several_teachers_answer_with_the_mean_of_their_logits(digits) -> None:
    teachers = [model_of(tiny_config(f"train.seed={seed}")) for seed in (1, 2)]
    together = Teacher(teachers)(digits[0])
    logits = [teacher(digits[0]).logits for teacher in teachers]
    assert not torch.allclose(*logits)
    torch.testing.assert_close(together, (logits[0] + logits[1]) / 2)
    assert not together.requires_grad


@needs_cuda
@pytest.mark.parametrize(
    "settings",
    [(), ("train.target_macs=0.6",), ("data.mixup=0.5",), ("train.random_threshold=1.2",)],
)
def test_captured_steps_train_as_plain_ones(tmp_path: Path, settings: tuple[str, ...]) -> None:
    weights = {}
    for graphs in ("auto", "off"):
        config = tiny_config(
            "train.batch_size=64",
            "train.device=cuda",
            "train.precision=64-true",
            "train.compile=off",
            f"train.cuda_graphs={graphs}",
            *settings,
        )
        result = fit(config, tmp_path / graphs, quiet=True)
        weights[graphs] = result.model.state_dict()
    # A captured learning rate is held in single precision.
    for name, captured in weights["auto"].items():
        torch.testing.assert_close(captured, weights["off"][name], rtol=1e-4, atol=1e-4, msg=name)
