"""Convolution, batch norm, gate, ReLU: in this order."""

import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.layers.description import Layer, conv_layer, conv_output_size
from deepmoe.ops import scale_channels


class GatedConv(nn.Module):
    """conv -> BN -> times gate -> ReLU.

    The gate stands after BN, because BN would turn a zeroed channel into a constant. Since gates
    are not negative, gate-then-ReLU equals ReLU-then-gate, and the gate of an output channel is
    the mixture weight of that expert in the next convolution.

    A width of 0 on either side is allowed: it is what physically removing every channel leaves.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        relu: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=dilation * (kernel_size // 2),
            dilation=dilation,
            bias=False,
        )
        self.bn = nn.BatchNorm2d(out_channels)
        self.relu = relu

    def forward(self, x_BCHW: Tensor, g_BC: Tensor | None = None) -> Tensor:
        y = self._convolve(x_BCHW)
        if self.conv.out_channels:
            y = self.bn(y)
        # ReLU and gate may change places, as gates are not negative. This way round, the gradient
        # of a closed gate is not lost in a ReLU of zero, and it may open again.
        return scale_channels(F.relu(y) if self.relu else y, g_BC)

    def _convolve(self, x_BCHW: Tensor) -> Tensor:
        if self.conv.in_channels and self.conv.out_channels:
            return self.conv(x_BCHW)
        # PyTorch's convolution takes no empty weight; the sum over no experts is zero.
        size = self.output_size(x_BCHW.shape[-2], x_BCHW.shape[-1])
        return x_BCHW.new_zeros(x_BCHW.shape[0], self.conv.out_channels, *size)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output for an input of this size."""
        conv = self.conv
        assert not isinstance(conv.padding, str)
        geometry = (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
        return conv_output_size((height, width), *geometry)

    def describe(
        self,
        path: str,
        size: tuple[int, int],
        in_gate: int | None = None,
        out_gate: int | None = None,
    ) -> Layer:
        """This convolution as data, for an output of this size."""
        return conv_layer(path, self.conv, size, in_gate, out_gate)
