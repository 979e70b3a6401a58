"""Layers as data: what a convolution or linear layer costs, and which gates stand around it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layer:
    """One convolution or linear layer at a given input size, with the gates on either side.

    Its cost is `kernel_area * positions * in * out`, where a gated side counts active channels.
    """

    path: str  # of the module inside its network
    is_conv: bool
    kernel_area: int
    positions: int  # output height times width
    in_channels: int
    out_channels: int
    in_gate: int | None = None  # which gate scales the input channels
    out_gate: int | None = None  # which gate scales the output channels


def conv_output_size(
    size: tuple[int, int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Height and width of a convolution's output for an input of this size."""
    height, width = (
        (size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    )
    return height, width


def conv_layer(
    path: str,
    conv: nn.Conv2d,
    size: tuple[int, int],
    in_gate: int | None = None,
    out_gate: int | None = None,
) -> Layer:
    """Describes a convolution whose output has this size."""
    return Layer(
        path,
        is_conv=True,
        kernel_area=conv.kernel_size[0] * conv.kernel_size[1],
        positions=size[0] * size[1],
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        in_gate=in_gate,
        out_gate=out_gate,
    )


def linear_layer(path: str, linear: nn.Linear, in_gate: int | None = None) -> Layer:
    """Describes a linear classifier."""
    return Layer(
        path,
        is_conv=False,
        kernel_area=1,
        positions=1,
        in_channels=linear.in_features,
        out_channels=linear.out_features,
        in_gate=in_gate,
    )
