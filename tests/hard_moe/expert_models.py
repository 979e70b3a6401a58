"""Small models of experts, images that fall into clusters, and a run's settings."""

from collections.abc import Iterator

import torch
from helpers import randomise_statistics, tiny_config
from torch import Tensor, nn

from deepmoe.config import GIVEN, ModelConfig, RunConfig
from deepmoe.hard_moe import HardMoE
from deepmoe.registry import create_model, from_network
from deepmoe.training import FitResult

EXPERTS = 3


def model_of(size: int = 16, images: int = 8) -> tuple[HardMoE, Tensor]:
    """A made-up model whose experts differ, and images of which each expert runs some."""
    model = create_model("resnet20", classes=6, wide=0.25, gates=None, experts=EXPERTS).eval()
    assert isinstance(model, HardMoE)
    randomise_statistics(model)
    for parameter in model.network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    x = torch.randn(images, 3, size, size)
    with torch.no_grad():
        model.centroids.copy_(model.embedding(x[:EXPERTS]))
    return model, x


class Colours:
    """A loader of images of one colour each, some shades around each of a few."""

    def __init__(self, colours: list[float], shades: float = 0.05, images: int = 60) -> None:
        generator = torch.Generator().manual_seed(1)
        self.kinds = torch.arange(images) % len(colours)
        grey = torch.tensor(colours)[self.kinds] + shades * torch.rand(images, generator=generator)
        self.x_BCHW = grey.view(-1, 1, 1, 1).expand(-1, 3, 8, 8)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x_BCHW.split(25), self.kinds.split(25), strict=True)


def of_colours(experts: int) -> HardMoE:
    """A model whose features grow with the brightness of an image."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    nn.init.constant_(network[0].weight, 1.0)
    source = ModelConfig(GIVEN, gates="none", experts=experts)
    model = from_network(network, source, None, (8, 8), None, None)
    assert isinstance(model, HardMoE)
    return model


def mixture(start: FitResult, *settings: str) -> RunConfig:
    experts = ("model.gates=none", f"model.experts={EXPERTS}", f"train.start={start.checkpoint}")
    return tiny_config(*experts, "train.epochs=2", "train.finetune_epochs=0", *settings)
