"""The paper's base networks: plain modules with a plain forward."""

from deepmoe.networks.resnet import DRN, ResNet
from deepmoe.networks.vgg import VGG

__all__ = ["DRN", "VGG", "ResNet"]
