"""A network that flattens its features, in a way that others choose."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Flattened(nn.Module):
    """Flattens features of several positions, so that a linear layer reads each channel often."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 3, padding=1)
        self.hidden = nn.Linear(4 * 4 * 4, 6)
        self.classifier = nn.Linear(6, 5)

    def prepared(self, x: Tensor) -> Tensor:
        return x

    def flat(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(self.prepared(x)))))
        return self.classifier(F.relu(self.hidden(self.flat(F.max_pool2d(x, 2)))))
