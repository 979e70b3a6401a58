"""Small networks, of which each has one thing that networks of others do."""

import torch
import torch.nn.functional as F
from helpers import randomise_statistics
from torch import Tensor, nn

import deepmoe
from deepmoe.model import DeepMoE


class Network(nn.Module):
    """A stem of eight channels, something of sixteen, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(16, 5)

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.classifier(self.middle(x).mean(dim=(2, 3)))


class Residual(Network):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        return self.last(x + self.two(F.relu(self.one(x))))


class InPlace(Network):
    """An activation changes what a shortcut then reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.relu, self.last = nn.ReLU(inplace=True), nn.Conv2d(8, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        x = self.one(x)
        y = self.two(self.relu(x))
        y += x  # what ReLU has left there
        return F.hardswish(self.last(y), inplace=True)


class Functional(Network):
    """Layers are called by their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 10, 3), nn.Conv2d(10, 16, 1)
        self.other_norm = nn.BatchNorm2d(10)

    def middle(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.one.weight, self.one.bias, stride=2, padding=2)
        norm = self.other_norm
        given = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        x = F.relu(F.batch_norm(x, *given, self.training, 0.1, norm.eps))
        return F.conv2d(x, self.two.weight, self.two.bias)


class Concatenated(Network):
    """Each layer reads what all before it have made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(12, 6, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(12), nn.BatchNorm2d(18)])
        self.last = nn.Conv2d(18, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.one(x)], dim=1)
        x = torch.cat([x, self.two(F.relu(self.norms[0](x)))], dim=1)
        return self.last(F.relu(self.norms[1](x)))


class Split(Network):
    """Two halves go different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.left, self.right = (
            nn.Conv2d(8, 12, 1),
            nn.Conv2d(6, 5, 1),
            nn.Conv2d(6, 7, 1),
        )
        self.last = nn.Conv2d(12, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        left, right = self.one(x).chunk(2, dim=1)
        return self.last(torch.cat([self.right(right), self.left(left)], dim=1).relu())


class Gated(Network):
    """Half of the channels multiply the others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 1), nn.Conv2d(6, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        value, weight = self.one(x).chunk(2, dim=1)
        return self.last(value * weight.sigmoid())


class Shuffled(Network):
    """Channels of two branches alternate, and are split again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)
        self.three, self.last = nn.Conv2d(6, 6, 1), nn.Conv2d(12, 16, 1)

    def middle(self, x: Tensor) -> Tensor:
        x = torch.cat([self.one(x), self.two(x)], dim=1)
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        left, right = x.chunk(2, dim=1)
        return self.last(torch.cat([left, self.three(right).relu()], dim=1))


class Squeezed(Network):
    """Squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 16, 1)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)

    def middle(self, x: Tensor) -> Tensor:
        x = F.silu(self.one(x))
        scale = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return self.last(x * scale.sigmoid())


class Depthwise(Network):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.last = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1)
        self.depthwise = nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12)
        self.other_norm = nn.BatchNorm2d(12)

    def middle(self, x: Tensor) -> Tensor:
        x = F.relu6(self.expand(x))
        return self.last(F.gelu(self.other_norm(self.depthwise(x))))


class Grouped(Network):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=3)

    def middle(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.grouped(F.relu(self.one(x)))))


class Dropping(Network):
    """Both kinds of dropout, as modules and as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1)
        self.drop = nn.Dropout2d(0.4)

    def middle(self, x: Tensor) -> Tensor:
        x = F.dropout(self.drop(self.one(x)), 0.3, self.training)
        return F.dropout(self.last(x), training=self.training)


class Linears(Network):
    """Layers that read channels at the end of a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 16)
        self.scale = nn.Parameter(torch.rand(12))

    def middle(self, x: Tensor) -> Tensor:
        x = self.scale * F.gelu(self.one(x.permute(0, 2, 3, 1)))
        return self.two(x).permute(0, 3, 1, 2)


def gated(kind: type[Network], where: str = "all", size: tuple[int, int] = (20, 20)) -> DeepMoE:
    network = randomise_statistics(kind())
    return deepmoe.gate(network, torch.randn(2, 3, *size), where=where)
