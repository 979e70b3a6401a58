"""Operations on gated channels: the paper's sum as a plain reference, and what networks run."""

import torch
import torch.nn.functional as F
from torch import Tensor


def mixture_of_experts_conv2d(
    x_BCHW: Tensor, weight_OCKK: Tensor, g_BC: Tensor, *, stride: int = 1, padding: int = 0
) -> Tensor:
    """z = sum_i g_i (K_i * x_i): each input channel is an expert, its gate the mixture weight.

    Slow, and plainly right: networks run the equal `scale_channels` before a convolution.
    """
    experts = [
        g_BC[:, i, None, None, None]
        * F.conv2d(x_BCHW[:, i : i + 1], weight_OCKK[:, i : i + 1], stride=stride, padding=padding)
        for i in range(x_BCHW.shape[1])
    ]
    return sum(experts[1:], start=experts[0])


def scale_channels(x_BCHW: Tensor, g_BC: Tensor | None) -> Tensor:
    """Multiplies every channel by its gate; `None` leaves the input as it is.

    The gate takes the input's dtype, so that fp32 gates don't promote bf16 activations.
    """
    if g_BC is None:
        return x_BCHW
    return x_BCHW * g_BC.to(x_BCHW.dtype)[:, :, None, None]


def at_least_single(x: Tensor) -> Tensor:
    """The tensor in single precision, or in double if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_half(dtype: torch.dtype) -> bool:
    """Whether numbers take 16 bits."""
    return dtype in (torch.bfloat16, torch.float16)
