"""Checkpoints of earlier formats: what their tensors are called now."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from deepmoe.config import ModelConfig
from deepmoe.errors import UserError
from deepmoe.networks.vgg import CONVS_PER_STAGE

T = TypeVar("T")
NAMED_ANEW = 3  # the format since which networks are plain modules, named as in torchvision

_RESIDUAL: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\bbackbone\.stem\.conv\.", "network.conv1."),
    (r"\bbackbone\.stem\.bn\.", "network.bn1."),
    (r"\bbackbone\.stages\.(\d+)\.", lambda m: f"network.layer{int(m[1]) + 1}."),
    (r"\.convs\.(\d)\.(conv|bn)\.", lambda m: f".{m[2]}{int(m[1]) + 1}."),
    (r"\.shortcut\.conv\.", ".downsample.0."),
    (r"\.shortcut\.bn\.", ".downsample.1."),
    (r"\bbackbone\.", "network."),
]


def check_gates(format_version: int, model: ModelConfig) -> None:
    """Refuses models that no network of today computes."""
    if format_version < NAMED_ANEW and model.gates == "all" and not model.name.startswith("vgg"):
        raise UserError(
            'its gates = "all" stand between a block and the residual stream, which this version '
            "no longer supports: train the model again"
        )


def renamed(tensors: Mapping[str, T], format_version: int, model: ModelConfig) -> dict[str, T]:
    """Tensors (or their shapes) by the names that they have in this version."""
    if format_version >= NAMED_ANEW:
        return dict(tensors)
    rename = _name_in_vgg if model.name.startswith("vgg") else _name_in_resnet
    return {rename(name, model.name): tensor for name, tensor in tensors.items()}


def _name_in_resnet(name: str, model: str) -> str:
    if "backbone." not in name:
        return name
    for pattern, replacement in _RESIDUAL:
        name = re.sub(pattern, replacement, name)
    return name


def _name_in_vgg(name: str, model: str) -> str:
    # Convolution, norm, ReLU, and at the end of each stage a pooling.
    stages = CONVS_PER_STAGE.get(int(model.removeprefix("vgg")), ())

    def features(match: re.Match[str]) -> str:
        number = int(match[1])
        pools = sum(number >= sum(stages[: s + 1]) for s in range(len(stages)))
        return f"network.features.{3 * number + pools + (match[2] == 'bn')}."

    name = re.sub(r"\bbackbone\.convs\.(\d+)\.(conv|bn)\.", features, name)
    return re.sub(r"\bbackbone\.", "network.", name)
