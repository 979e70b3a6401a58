"""The mixture-of-experts convolution, written as the paper's sum. Slow, and plainly right."""

import torch.nn.functional as F
from torch import Tensor


def mixture_of_experts_conv2d(
    x_BCHW: Tensor, weight_OCKK: Tensor, g_BC: Tensor, *, stride: int = 1, padding: int = 0
) -> Tensor:
    """z = sum_i g_i (K_i * x_i): each input channel is an expert, its gate the mixture weight."""
    experts = [
        g_BC[:, i, None, None, None]
        * F.conv2d(x_BCHW[:, i : i + 1], weight_OCKK[:, i : i + 1], stride=stride, padding=padding)
        for i in range(x_BCHW.shape[1])
    ]
    return sum(experts[1:], start=experts[0])
