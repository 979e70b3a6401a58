"""Residual networks: basic and bottleneck blocks, for CIFAR and ImageNet, dilated if asked.

Modules are named as in torchvision, so that its weights can be loaded as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.networks.widths import initialise_convs, scaled_width


@dataclass(frozen=True)
class ResNetStage:
    """A run of blocks that share one width; the first block carries the stride."""

    blocks: int
    width: int
    stride: int = 1
    dilation: int = 1


class PadShortcut(nn.Module):
    """Strided subsampling with zero channels appended: a shortcut without parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = out_channels - in_channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = x_BCHW[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.extra))


class BasicBlock(nn.Module):
    """relu(shortcut(x) + 3x3(3x3(x)))."""

    expansion = 1
    inner = 1  # convolutions whose width can be chosen

    def __init__(
        self, inputs: int, width: int, widths: Sequence[int], stride: int, dilation: int
    ) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv3x3(inputs, widths[0], stride, dilation)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.conv2 = _conv3x3(widths[0], outputs, 1, dilation)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x_BCHW)))
        y = self.bn2(self.conv2(y))
        return F.relu(self.downsample(x_BCHW) + y)


class Bottleneck(nn.Module):
    """relu(shortcut(x) + 1x1(3x3(1x1(x))))."""

    expansion = 4
    inner = 2

    def __init__(
        self, inputs: int, width: int, widths: Sequence[int], stride: int, dilation: int
    ) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, widths[0], 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.conv2 = _conv3x3(widths[0], widths[1], stride, dilation)
        self.bn2 = nn.BatchNorm2d(widths[1])
        self.conv3 = nn.Conv2d(widths[1], outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x_BCHW)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(self.downsample(x_BCHW) + y)


class ResNet(nn.Module):
    """Stem, stages of residual blocks, global pooling, a linear classifier.

    Args:
        block: what the stages consist of.
        stages: blocks, widths, strides and dilations.
        widths: for each block, the widths of its inner convolutions.
        classes: number of classes.
        stem: one 3x3 convolution (`cifar`), or a strided 7x7 and max pooling (`imagenet`).
        shortcut: zero-padded (`pad`) or a 1x1 convolution (`conv`) where shapes change.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        stages: Sequence[ResNetStage],
        widths: Sequence[Sequence[int]],
        classes: int,
        *,
        stem: Literal["cifar", "imagenet"],
        shortcut: Literal["pad", "conv"],
    ) -> None:
        super().__init__()
        stream = stages[0].width
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, stream, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(3, stream, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(stream)
        left = iter(widths)
        for number, stage in enumerate(stages, start=1):
            blocks = []
            for b in range(stage.blocks):
                stride, out = stage.stride if b == 0 else 1, stage.width * block.expansion
                made = block(stream, stage.width, next(left), stride, stage.dilation)
                if stride != 1 or stream != out:
                    made.downsample = _shortcut(stream, out, stride, shortcut)
                blocks.append(made)
                stream = out
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.stages = len(stages)
        self.fc = self._classifier(stream, classes)
        initialise_convs(self)

    def _classifier(self, channels: int, classes: int) -> nn.Module:
        return nn.Linear(channels, classes)

    def features(self, x_BCHW: Tensor) -> Tensor:
        """The residual stream after the last block."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x_BCHW))))
        for number in range(1, self.stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return x

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.fc(self.features(x_BCHW).mean(dim=(2, 3)))


class DRN(ResNet):
    """A dilated residual network with a classifier at every pixel; logits at the input's size."""

    def _classifier(self, channels: int, classes: int) -> nn.Module:
        return nn.Conv2d(channels, classes, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits = self.fc(self.features(x_BCHW))
        size = (x_BCHW.shape[2], x_BCHW.shape[3])
        return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)


# The blocks by name: what they are made of, and which inner convolutions are gated and widened.
BLOCKS: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[bool, ...]]] = {
    "basic": (BasicBlock, (True,)),
    "bottleneck-a": (Bottleneck, (True, True)),
    "bottleneck-b": (Bottleneck, (False, True)),
}


def make_resnet(
    network: type[ResNet],
    stages: Sequence[ResNetStage],
    classes: int,
    *,
    block: str,
    wide: float = 1.0,
    widths: Sequence[int] | None = None,
    stem: Literal["cifar", "imagenet"] = "imagenet",
    shortcut: Literal["pad", "conv"] = "conv",
) -> ResNet:
    """Builds a residual network.

    Args:
        network: `ResNet` or `DRN`.
        stages: blocks, widths, strides and dilations.
        classes: number of classes.
        block: a name from `BLOCKS`.
        wide: factor on the widths that are gated inside a block; the residual stream keeps its own.
        widths: instead of the stages' widths, the output width of every inner convolution: one a
            basic block, two a bottleneck.
        stem: see `ResNet`.
        shortcut: see `ResNet`.
    """
    if block not in BLOCKS:
        raise UserError(f"no block is named {block!r}; there are {', '.join(BLOCKS)}")
    if isinstance(widths, str):
        raise UserError(f"only vgg16 has named widths, so {widths!r} must be a list here")
    kind, widened = BLOCKS[block]
    plan = [stage for stage in stages for _ in range(stage.blocks)]
    inner = kind.inner
    if widths is None:
        widths = [stage.width for stage in plan for _ in range(inner)]
    elif len(widths) != inner * len(plan):
        raise UserError(
            f"this network has {inner * len(plan)} inner convolutions, but got {len(widths)} widths"
        )
    factors = [wide if is_wide else 1.0 for is_wide in widened]
    per_block = [
        [scaled_width(widths[inner * b + i], factors[i]) for i in range(inner)]
        for b in range(len(plan))
    ]
    return network(kind, stages, per_block, classes, stem=stem, shortcut=shortcut)


def inner_convs(network: nn.Module, block: str) -> list[str]:
    """Paths of the convolutions inside of blocks that the paper gates."""
    kind, gated = BLOCKS[block]
    blocks = [path for path, module in network.named_modules() if isinstance(module, kind)]
    return [f"{path}.conv{i + 1}" for path in blocks for i, on in enumerate(gated) if on]


def cifar_stages(depth: int) -> list[ResNetStage]:
    """Stages of ResNet-20, -32, -44, -56 and -110: three, of widths 16, 32 and 64."""
    blocks = (depth - 2) // 6
    return [ResNetStage(blocks, 16 * 2**s, stride=1 if s == 0 else 2) for s in range(3)]


IMAGENET_DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def imagenet_stages(depth: int) -> list[ResNetStage]:
    """Stages of ResNet-18, -34, -50 and -101: four, of widths 64 to 512."""
    counts = IMAGENET_DEPTHS[depth]
    return [ResNetStage(n, 64 * 2**s, stride=1 if s == 0 else 2) for s, n in enumerate(counts)]


def drn_a_50_stages() -> list[ResNetStage]:
    """ResNet-50 with the last two stages dilated instead of strided: output stride 8."""
    return [
        ResNetStage(3, 64),
        ResNetStage(4, 128, stride=2),
        ResNetStage(6, 256, dilation=2),
        ResNetStage(3, 512, dilation=4),
    ]


def _conv3x3(inputs: int, outputs: int, stride: int, dilation: int) -> nn.Conv2d:
    return nn.Conv2d(
        inputs, outputs, 3, stride=stride, padding=dilation, dilation=dilation, bias=False
    )


def _shortcut(inputs: int, outputs: int, stride: int, kind: str) -> nn.Module:
    if kind == "pad":
        return PadShortcut(inputs, outputs, stride)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
    )
