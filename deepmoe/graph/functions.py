"""Operations that a captured graph calls where PyTorch's own would hold on to what it saw once."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv2d(
    x_BCHW: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
) -> Tensor:
    """A convolution whose number of groups follows from its weights, which may get smaller."""
    groups = max(1, x_BCHW.shape[1] // max(1, weight.shape[1]))
    return F.conv2d(x_BCHW, weight, bias, stride, padding, dilation, groups)


def batch_norm(x_BCHW: Tensor, module: nn.BatchNorm2d) -> Tensor:
    """Batch norm as PyTorch's own module does it, in training too, whatever the subclass adds."""
    return nn.BatchNorm2d.forward(module, x_BCHW)


def constant(
    like: Tensor, values: Sequence[float], shape: Sequence[int], dtype: torch.dtype | None
) -> Tensor:
    """A tensor that a network's code holds, where another one is.

    It is filled in there: a CUDA graph could not bring it to its GPU.
    """
    if not values:
        return like.new_empty(shape, dtype=dtype)
    return torch.stack([like.new_full((), value, dtype=dtype) for value in values]).view(shape)
