"""Dilated residual networks for segmentation."""

import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.backbones.base import Runner
from deepmoe.backbones.resnet import ResNet, ResNetStage
from deepmoe.layers import Layer, conv_layer


class DRN(ResNet):
    """A residual network with a classifier at every pixel; logits at the input's size."""

    def _make_classifier(self, channels: int, classes: int) -> nn.Module:
        return nn.Conv2d(channels, classes, 1)

    def wire_gated(self, x_BCHW: Tensor, run: Runner, size: tuple[int, int]) -> Tensor:
        logits = run.classify("fc", self.wire_blocks(x_BCHW, run))
        return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)

    def _classifier_layer(self, size: tuple[int, int]) -> Layer:
        assert isinstance(self.fc, nn.Conv2d)
        return conv_layer("fc", self.fc, size)


def drn_a_50_stages() -> list[ResNetStage]:
    """ResNet-50 with the last two stages dilated instead of strided: output stride 8."""
    return [
        ResNetStage(3, 64),
        ResNetStage(4, 128, stride=2),
        ResNetStage(6, 256, dilation=2),
        ResNetStage(3, 512, dilation=4),
    ]
