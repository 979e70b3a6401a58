"""Networks that channels are removed from, and the images these are judged by."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from helpers import randomise_statistics
from torch import Tensor, nn

from deepmoe.model import DeepMoE
from deepmoe.registry import create_model

CLASSES = 5
IMAGES, LABELS = torch.randn(12, 3, 32, 32), torch.arange(12) % CLASSES


def loader(images: Tensor = IMAGES, labels: Tensor = LABELS) -> SimpleNamespace:
    """Stands for a loader of training images, in two batches."""
    parts = list(zip(images.split(8), labels.split(8), strict=True))
    return SimpleNamespace(epoch=lambda number: iter(parts))


NETWORKS = {
    "vgg11": {"widths": [8] * 8},
    "resnet20": {"wide": 0.5},
    "resnet18_cifar": {"block": "basic", "wide": 0.0625},
}


def dense(name: str, **options: object) -> DeepMoE:
    torch.manual_seed(0)
    made = create_model(name, classes=CLASSES, gates=None, **NETWORKS[name], **options).eval()
    return randomise_statistics(made)


class Small(nn.Module):
    """Two convolutions that make 4 and 6 channels, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.two = nn.Conv2d(4, 6, 3)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.one(x)))
        return self.fc(F.relu(self.two(y)).mean(dim=(2, 3)))
