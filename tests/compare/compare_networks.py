"""Small networks that methods are tried out on, and the tasks that go with them."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from helpers import randomise_statistics
from torch import Tensor, nn

from deepmoe.compare import PruningTask
from deepmoe.graph import describe, prunable
from deepmoe.model import DeepMoE

CLASSES = 4


class Chain(nn.Module):
    """Three convolutions: one strided with a norm behind, one with a bias, and a classifier."""

    def __init__(self, last: int = 5) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 7, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(7)
        self.three = nn.Conv2d(7, last, (1, 2))
        self.fc = nn.Linear(last, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.one(x)))
        y = F.relu(self.norm2(self.two(y)))
        return self.fc(F.relu(self.three(y)).mean(dim=(2, 3)))


class Block(nn.Module):
    """A basic block of four channels; it adds in place, as torchvision's do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


class Residual(nn.Module):
    """A stem, two basic blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.relu(self.stem(x))).mean(dim=(2, 3)))


class Mobile(nn.Module):
    """Expansion, a depthwise convolution, squeeze and excitation, projection; two readers join."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 12, 1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.squeeze, self.excite = nn.Linear(12, 4), nn.Linear(4, 12)
        self.left, self.right = nn.Conv2d(12, 6, 1), nn.Conv2d(12, 6, 3, padding=1, bias=False)
        self.last = nn.Conv2d(12, 8, 1)
        self.fc = nn.Linear(8 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.depthwise(F.silu(self.norm(self.expand(x)))))
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean(dim=(2, 3))))))
        y = y * scale[:, :, None, None]
        y = F.relu(self.last(torch.cat([self.left(y), self.right(y)], dim=1)))
        return self.fc(F.adaptive_avg_pool2d(y, 4).flatten(1))


def loader(images: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
    """Stands for a loader of training images, in several batches."""
    labels = torch.arange(len(images)) % CLASSES if labels is None else labels
    parts = list(zip(images.split(16), labels.split(16), strict=True))
    return SimpleNamespace(epoch=lambda number: iter(parts))


def task_of(
    network: nn.Module,
    images: Tensor,
    *,
    share: float = 0.5,
    widths: dict[str, int] | None = None,
    seed: int = 0,
) -> PruningTask:
    """A task for a network in double precision; widths are by the names of groups."""
    network = randomise_statistics(network).double().eval()
    gating = prunable(describe(network, images[:2]))
    model = DeepMoE(None, None, network, gating)
    size = (images.shape[2], images.shape[3])
    given = None
    if widths is not None:
        full = zip(gating.names, gating.widths, strict=True)
        given = tuple(widths.get(name, width) for name, width in full)
        assert set(widths) <= set(gating.names)
    return PruningTask(model, gating, size, share, loader(images), widths=given, seed=seed)


def small_images(count: int = 48) -> Tensor:
    """Random ones of 7 by 6 pixels."""
    return torch.randn(count, 3, 7, 6, dtype=torch.float64)
