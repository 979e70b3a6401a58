"""What several tests need: random gates, a count by PyTorch itself, small runs, their weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from deepmoe.config import RunConfig, load_config
from deepmoe.graph import Gating

TINY_RUN = (
    "data.size=8",
    "model.widths=[4, 4, 4, 4, 4, 4, 4, 4, 4]",
    "embedding.widths=[4, 8]",
    "train.epochs=2",
    "train.finetune_epochs=2",
    "train.batch_size=256",
    "train.lr=0.1",
)


def tiny_config(*overrides: str) -> RunConfig:
    """A run of seconds that uses every part of training."""
    return load_config("quickstart", [*TINY_RUN, *overrides])


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def slow(*values: object, **options: str) -> Any:
    """A case that `make test-all` alone runs: others say nearly the same."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def random_gates(widths: Sequence[int], images: int, density: float = 0.5) -> list[Tensor]:
    """Gates of which about this share is not zero."""
    return [torch.rand(images, w) * (torch.rand(images, w) < density) for w in widths]


def counted_macs(network: Callable[..., object], *inputs: object) -> int:
    """MACs of a forward pass as PyTorch's own counter sees them (it counts two a MAC)."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(*inputs)
    flops = counter.get_total_flops()
    assert flops % 2 == 0
    return flops // 2


def randomise_statistics(network: nn.Module) -> nn.Module:
    """Makes batch norm do something, as after training."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.3)
            module.running_mean.normal_(0.0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    return network


def narrowed_for(
    network: nn.Module, gating: Gating, gates: Sequence[Tensor], image: int
) -> tuple[nn.Module, Gating, list[Tensor]]:
    """The physically small network of one image of a batch, and the gates that go with it."""
    keep = [g[image] != 0 for g in gates]
    small, small_gating, left = gating.narrow(network, keep)
    for mask, units in zip(keep, left, strict=True):
        assert units.tolist() == (mask.nonzero().flatten().tolist() or [0])
    kept = [g[image : image + 1, units] for g, units in zip(gates, left, strict=True)]
    return small, small_gating, kept
