"""The paper's networks: the preset that each is trained by, and what the smoke scale has for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepmoe.compare.method import changed
from deepmoe.config import RunConfig
from deepmoe.networks.vgg import VGG16_WIDTHS

SMALL = "resnet20"  # in place of all ResNets at the smoke scale; their blocks stay
THIN = 1 / 8  # of their widths; of other networks a quarter of that


@dataclass(frozen=True)
class Network:
    """A base network.

    Attributes:
        preset: with the paper's schedule; `{data}` stands for the data set.
        settings: what is different there.
    """

    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gates_last(self) -> bool:
        """Whether its last convolution can have a gate."""
        return self.preset.startswith("vgg")


def _block(kind: str) -> dict[str, Any]:
    return {"model.block": f"bottleneck-{kind}"}


NETWORKS = {
    "vgg16": Network("vgg16_{data}"),
    **{f"vgg16-{name}": Network("vgg16_{data}", {"model.widths": name}) for name in VGG16_WIDTHS},
    "resnet56": Network("resnet56_{data}"),
    "resnet110": Network("resnet110_{data}"),
    "resnet18-b": Network(
        "resnet56_{data}", {"model.name": "resnet18_cifar", **_block("b")}
    ),  # no preset of its own: the schedule is that of all ResNets on CIFAR
    "resnet18": Network("resnet18_{data}"),
    "resnet34": Network("resnet34_{data}"),
    "resnet50": Network("resnet50a_{data}"),
    "resnet50-b": Network("resnet50b_{data}"),
    "drn_a_50": Network("drn_a_50_{data}"),
    "drn_a_50-b": Network("drn_a_50_{data}", _block("b")),
}


def thinned(config: RunConfig) -> RunConfig:
    """The network of a configuration with a fraction of its channels, and of its blocks."""
    model = config.model
    if not model.name.startswith("resnet"):
        return changed(config, {"model.wide": THIN / 4 * model.wide})
    return changed(config, {"model.name": SMALL, "model.wide": THIN * model.wide})
