"""A base network's layers as evaluation runs them: batch norm folded into weights and biases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Side = int | Tensor | None
"""The gates of a layer's channels on one side: a whole group's in order, or (a tensor) for each
channel which of all gates side by side it has, -1 for none; `None` where no channel has one."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y,
    "relu": partial(F.relu, inplace=True),
    "relu6": partial(F.relu6, inplace=True),
    "silu": partial(F.silu, inplace=True),
    "hardswish": partial(F.hardswish, inplace=True),
}
"""What may stand behind a layer, by name; done in place."""


@dataclass(frozen=True)
class FoldedLayer:
    """A convolution or linear layer with batch norm inside, and the gates around it."""

    weight: Tensor  # (O, I, K, K), or (O, I) of a linear layer
    bias: Tensor | None
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    activation: str = ""  # of `ACTIVATIONS`: at last, after what may be added
    ins: Side = None  # which gates choose the input channels
    outs: Side = None  # which gates choose the output channels
    scale: int | None = None  # the gate that also multiplies the output channels, if one does

    @property
    def is_conv(self) -> bool:
        return self.weight.ndim == 4

    @property
    def relu(self) -> bool:
        """Whether the activation is the one that all kernels know."""
        return self.activation == "relu"

    def activate_other(self, y: Tensor) -> Tensor:
        """Applies an activation that a kernel did not know, in place."""
        return y if self.activation in ("", "relu") else ACTIVATIONS[self.activation](y)

    @property
    def gated(self) -> bool:
        """Whether which channels run depends on gates."""
        return self.ins is not None or self.outs is not None

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a convolution's output for an input of this size."""
        sides = zip((height, width), self.weight.shape[2:], strict=True)
        rows, columns = (
            (n + 2 * self.padding[i] - self.dilation[i] * (k - 1) - 1) // self.stride[i] + 1
            for i, (n, k) in enumerate(sides)
        )
        return rows, columns

    def take(self, outputs: Tensor | None, inputs: Tensor | None) -> Self:
        """The layer of these output and input channels alone; `None` takes all of them.

        A grouped convolution loses whole groups, so that its outputs say all.
        """
        weight, bias, groups = self.weight, self.bias, self.groups
        if outputs is not None:
            weight = weight.index_select(0, outputs)
            bias = None if bias is None else bias.index_select(0, outputs)
            groups = groups * len(weight) // len(self.weight) if groups > 1 else 1
        if inputs is not None and self.groups == 1:
            weight = weight.index_select(1, inputs)
        return replace(self, weight=weight, bias=bias, groups=groups)


@dataclass(frozen=True)
class Affine:
    """A batch norm that no convolution takes in: x * scale + shift, and an activation."""

    scale: Tensor
    shift: Tensor
    activation: str
    channels: Side

    def take(self, channels: Tensor | None) -> Self:
        """That of these channels alone; `None` takes all of them."""
        if channels is None:
            return self
        scale, shift = (t.index_select(0, channels) for t in (self.scale, self.shift))
        return replace(self, scale=scale, shift=shift)

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        y = torch.addcmul(self.shift[:, None, None], x_BCHW, self.scale[:, None, None])
        return ACTIVATIONS[self.activation](y)


@dataclass(frozen=True)
class FollowingParameter:
    """A parameter with a value for each channel, such as one that scales what a block adds."""

    value: Tensor
    dim: int
    channels: Side

    def take(self, channels: Tensor | None) -> Tensor:
        """The values of these channels alone; `None` takes all of them."""
        return self.value if channels is None else self.value.index_select(self.dim, channels)


def fold(
    layer: nn.Module, norm: nn.BatchNorm2d | None, dtype: torch.dtype, **around: Any
) -> FoldedLayer:
    """A convolution or linear layer with the norm behind it in its weights.

    Args:
        layer: with weight and bias.
        norm: in evaluation mode.
        dtype: of the result.
        **around: other fields of the result.
    """
    assert isinstance(layer.weight, Tensor)
    weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
    bias = None if bias is None else bias.detach()
    if norm is not None:
        scale, shift = norm_as_affine(norm)
        weight = weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))
        bias = shift if bias is None else bias.double() * scale + shift
    folded = FoldedLayer(weight.to(dtype), None if bias is None else bias.to(dtype), **around)
    return in_best_format(folded)


def in_best_format(layer: FoldedLayer) -> FoldedLayer:
    """GPUs like channels last; on a CPU, the taps of a kernel lie together."""
    if not layer.is_conv:
        return layer
    best = torch.channels_last if layer.weight.is_cuda else torch.contiguous_format
    return replace(layer, weight=layer.weight.contiguous(memory_format=best))


def norm_as_affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Scale and shift of a batch norm, in double precision: they add no error to speak of."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """A number for both sides, or one for each."""
    if isinstance(value, int):
        return value, value
    return value[0], value[-1]
