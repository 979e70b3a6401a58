"""Max pooling that also takes a tensor without channels, as a network may lose all of a layer."""

import torch.nn.functional as F
from torch import Tensor


def max_pool(x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
    """The largest value of every square of a channel."""
    if x_BCHW.shape[1]:
        return F.max_pool2d(x_BCHW, size, stride, padding)
    return x_BCHW.new_empty(len(x_BCHW), 0, *pooled_size(x_BCHW, size, stride, padding))


def pooled_size(x_BCHW: Tensor, size: int, stride: int, padding: int) -> tuple[int, int]:
    """Height and width after pooling."""
    height, width = ((n + 2 * padding - size) // stride + 1 for n in x_BCHW.shape[2:])
    return height, width
