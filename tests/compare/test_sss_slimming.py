"""Methods that train before they prune: scaling factors (SSS), and scales of batch norm."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import randomise_statistics, tiny_config
from safetensors.torch import load_file
from torch import Tensor, nn

import deepmoe
from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import HeadsConfig, RunConfig
from deepmoe.costs import count_costs
from deepmoe.errors import UserError
from deepmoe.graph import prunable
from deepmoe.layers import ScaleFactors
from deepmoe.losses import norm_l1
from deepmoe.pruning import prune
from deepmoe.registry import create_model
from deepmoe.training import FitResult, fit
from deepmoe.training.proximal import ProximalSGD

WIDTHS = "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]"
PLAIN = (WIDTHS, "train.epochs=2", "train.finetune_epochs=0")
FACTORS = (*PLAIN, "heads.kind=scale", "model.gates=inner", "loss.sparsity=0.38")


def test_factors_step_as_the_equations_say() -> None:
    """z = prox(s - n g), v = z - s + m v, s = max(0, z + m v), number by number."""
    rate, shrinkage, momentum = 0.1, 0.7, 0.9
    factors = nn.Parameter(torch.tensor([1.0, 0.05, 0.3, -0.2], dtype=torch.float64))
    other = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    same = nn.Parameter(other.detach().clone())
    groups = [{"params": [other]}, {"params": [factors], "shrinkage": shrinkage}]
    ours = ProximalSGD(groups, lr=rate, momentum=momentum, nesterov=True)
    plain = torch.optim.SGD([same], lr=rate, momentum=momentum, nesterov=True)
    s, v = factors.detach().tolist(), [0.0] * 4
    for step in range(4):
        gradient = [0.5 - 0.3 * step, 1.0, -2.0, 0.1 * step]
        factors.grad = torch.tensor(gradient, dtype=torch.float64)
        other.grad = same.grad = torch.tensor([0.3, -0.4], dtype=torch.float64)
        ours.step()
        plain.step()
        for i, g in enumerate(gradient):
            z = s[i] - rate * g
            z = (z > 0) * max(abs(z) - rate * shrinkage, 0) - (z < 0) * max(
                abs(z) - rate * shrinkage, 0
            )
            v[i] = z - s[i] + momentum * v[i]
            s[i] = max(0.0, z + momentum * v[i])
        torch.testing.assert_close(factors.detach(), torch.tensor(s, dtype=torch.float64))
        assert torch.equal(other, same)  # all others learn as usual
    assert factors[1] == 0 < factors[2]


def test_factors_scale_what_a_gate_would() -> None:
    model = create_model("vgg11", classes=5, widths=[8] * 8, heads=HeadsConfig(kind="scale"))
    randomise_statistics(model.eval())
    assert isinstance(model.heads, ScaleFactors) and model.embedding is None and model.gated
    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(model(x).logits, model.network(x))  # they start at one
    with torch.no_grad():
        model.heads.weight.uniform_(0, 2)
    gates = [w.expand(3, -1) for w in model.heads.weight.split(list(model.gating.widths))]
    output = model(x)
    torch.testing.assert_close(output.logits, model.gating(model.network, x, gates))
    assert all(torch.equal(a, b) for a, b in zip(output.gates, gates, strict=True))
    assert count_costs(model, 32).gate_macs == 0  # they are multiplied into the weights


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    config = tiny_config("model.gates=none", *PLAIN)
    return fit(config, tmp_path_factory.mktemp("start"), quiet=True)


def with_factors(start: FitResult, *settings: str) -> RunConfig:
    return tiny_config(f"train.start={start.checkpoint}", *FACTORS, *settings)


@pytest.fixture(scope="module")
def factors(start: FitResult, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return fit(with_factors(start), tmp_path_factory.mktemp("factors"), quiet=True)


def after_sss(factors: FitResult, *settings: str) -> RunConfig:
    taken = (f"train.start={factors.checkpoint}", "train.prune=0.5", "train.prune_by=sss")
    return tiny_config(*taken, "model.gates=none", *PLAIN, *settings)


def test_factors_learn_to_be_zero_and_those_channels_go(factors: FitResult, tmp_path: Path) -> None:
    model = load_checkpoint(factors.checkpoint).model
    zeros = int((model.heads.weight == 0).sum())
    assert 0 < zeros < len(model.heads.weight)
    still = ("train.lr=1e-12", "train.weight_decay=0", "train.epochs=1")
    run = fit(after_sss(factors, *still), tmp_path, quiet=True)
    assert run.model.heads is None and run.evaluation.macs_share <= 0.5
    kept = run.model.source.kept
    every = prunable(model.gating.graph)
    for number, left, width in zip(every.gated, kept, every.widths, strict=True):
        if number not in model.gating.gated:
            assert left == width  # a residual stream


@torch.no_grad()
def test_where_only_zeros_go_the_network_computes_what_it_did() -> None:
    """Factors are multiplied into the weights that are left."""
    dense = randomise_statistics(create_model("vgg11", classes=5, gates=None, widths=[8] * 8))
    gating = prunable(dense.eval().gating.graph)
    factors = [torch.rand(width) + 0.1 for width in gating.widths]
    for group, part in enumerate(factors):
        part[: group + 1 if group < 7 else 7] = 0
    x = torch.randn(4, 3, 32, 32)
    expected = gating(dense.network, x, [part.expand(4, -1) for part in factors])
    widths = [int((part != 0).sum()) for part in factors]
    small = prune(dense, 32, None, None, by="sss", widths=widths, factors=factors)
    assert small.source.kept == tuple(widths)
    torch.testing.assert_close(small(x).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_run_with_factors_resumes_to_the_bit(
    start: FitResult, factors: FitResult, tmp_path: Path
) -> None:
    first = factors.checkpoint.with_name("epoch-0001.safetensors")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.safetensors").write_bytes(first.read_bytes())
    resumed = fit(with_factors(start), tmp_path / "run", resume=True, quiet=True)
    one, other = load_file(resumed.checkpoint), load_file(factors.checkpoint)
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert "optimizer.momentum_buffer.heads.weight" in one


def test_slimming_shrinks_scales_by_their_l1(start: FitResult, tmp_path: Path) -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(1))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([-1.0, 2.0, 0.5]))
    assert norm_l1(network) == 4.5

    def scales(strength: float) -> Tensor:
        asked = (f"loss.norm_sparsity={strength}", f"train.start={start.checkpoint}")
        run = fit(
            tiny_config(*asked, "model.gates=none", *PLAIN),
            tmp_path / str(strength),
            quiet=True,
        )
        norms = [m for m in run.model.network.modules() if isinstance(m, nn.BatchNorm2d)]
        return torch.cat([m.weight.detach().abs() for m in norms])

    shrunk, usual = scales(0.2), scales(0.0)
    assert shrunk.mean() < 0.9 * usual.mean()


class WithoutNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm, self.fc = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.two(F.relu(self.one(x))))).mean(dim=(2, 3)))


def test_networks_without_batch_norm_are_refused_before_any_work(tmp_path: Path) -> None:
    network = WithoutNorm().eval()
    images = torch.randn(2, 3, 16, 16)
    dense = deepmoe.DeepMoE(None, None, network, deepmoe.gate(network, images).gating)
    with pytest.raises(UserError, match="need batch norm behind every convolution, and one has"):
        prune(dense, 16, 0.5, None, by="slimming")
    dataset = torch.utils.data.TensorDataset(torch.randn(8, 3, 16, 16), torch.arange(8) % 5)
    for model, setting in (
        (dense, "loss.norm_sparsity=0.1"),
        (deepmoe.gate(network, images, heads=HeadsConfig(kind="scale")), "heads.kind=scale"),
    ):
        config = tiny_config(setting, "model.gates=none")
        with pytest.raises(UserError, match="need batch norm behind every convolution"):
            fit(model, dataset, dataset, config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_what_does_not_go_with_factors_gets_one_sentence(
    start: FitResult, factors: FitResult, tmp_path: Path
) -> None:
    for setting, words in (
        ("train.target_macs=0.5", "does not go with train.target_macs"),
        ("loss.sparsity=[[0, 1], [1, 2]]", "not by a schedule"),
        ("model.exits=true", "does not go with model.exits"),
    ):
        with pytest.raises(UserError, match=words):
            with_factors(start, setting)
    with pytest.raises(UserError, match=r"only say what to prune: set train.prune"):
        fit(after_sss(factors, "train.prune_by=li"), tmp_path / "a", quiet=True)
    with pytest.raises(UserError, match="trained with scaling factors"):
        fit(after_sss(start), tmp_path / "b", quiet=True)
    assert not list(tmp_path.iterdir())
