"""Batch norm, ReLU and gate in one, so that all of their gradients share one pass over the data."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmoe.ops.precision import at_least_single


def normalised_relu_gate(
    y_BCHW: Tensor, weight: Tensor, bias: Tensor, g_BC: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(batch norm of y) times the gate; also the batch's mean and (biased) variance.

    For compilers, which make few kernels of it. Run eagerly it takes many, and more memory.
    """
    variance, mean = torch.var_mean(at_least_single(y_BCHW.detach()), dim=(0, 2, 3), correction=0)
    scale = torch.rsqrt(variance + eps)
    out = _NormaliseReluGate.apply(y_BCHW, weight, bias, g_BC, mean, scale)
    assert isinstance(out, Tensor)
    return out, mean, variance


class _NormaliseReluGate(torch.autograd.Function):
    """The gate's gradient costs nothing: it follows from the sums that batch norm needs anyway.

    With d the gradient behind the ReLU, and sums over an image's positions, s = sum d and
    t = sum d * normalised: the gate has weight * t + bias * s, the bias sum_B gate * s, and the
    weight sum_B gate * t. Left to autograd, the gate's would be another pass over the activations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y_BCHW: Tensor,
        weight: Tensor,
        bias: Tensor,
        g_BC: Tensor,
        mean: Tensor,
        scale: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(y_BCHW, weight, bias, g_BC, mean, scale)
        normalised = (at_least_single(y_BCHW) - _over(mean)) * _over(scale)
        out = torch.relu(normalised * _over(weight) + _over(bias)) * g_BC[:, :, None, None]
        return out.to(y_BCHW.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCHW: Tensor) -> tuple[Tensor | None, ...]:
        y_BCHW, weight, bias, g_BC, mean, scale = ctx.saved_tensors
        normalised = (at_least_single(y_BCHW) - _over(mean)) * _over(scale)
        open_ = normalised * _over(weight) + _over(bias) > 0
        d_BCHW = torch.where(open_, at_least_single(grad_BCHW), 0.0)
        s_BC, t_BC = d_BCHW.sum(dim=(2, 3)), (d_BCHW * normalised).sum(dim=(2, 3))
        grad_bias, grad_weight = (g_BC * s_BC).sum(dim=0), (g_BC * t_BC).sum(dim=0)
        values = y_BCHW.numel() // y_BCHW.shape[1]
        centred = d_BCHW * g_BC[:, :, None, None] - _over(grad_bias / values)
        grad_y = (centred - normalised * _over(grad_weight / values)) * _over(weight * scale)
        grad_g = t_BC * weight + s_BC * bias
        return grad_y.to(y_BCHW.dtype), grad_weight, grad_bias, grad_g, None, None


def _over(channels: Tensor) -> Tensor:
    return channels[:, None, None]
