"""Base networks. Each runs as `backbone(x, gates)`; `gates=None` is the dense baseline."""

from deepmoe.backbones.base import Backbone, Layer, Runner
from deepmoe.backbones.drn import DRN
from deepmoe.backbones.resnet import ResNet
from deepmoe.backbones.vgg import VGG

__all__ = ["DRN", "VGG", "Backbone", "Layer", "ResNet", "Runner"]
