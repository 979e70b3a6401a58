"""Convolutions of images: three channels leave most of a GPU's matrix unit idle.

So the pixels that a kernel covers become channels: all of them for a small kernel, which leaves a
matrix product, or squares of the size of the stride where there is one, which leaves a smaller
convolution without stride.
"""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.ops import is_half
from deepmoe.sparse.folding import FoldedLayer

MOST_INPUTS = 4
MOST_VALUES = 64  # of patches that hold a whole kernel: beyond, they take too much memory
MULTIPLE = 8  # channels that a matrix unit takes at once


class ImageConvolution:
    """A convolution of few input channels, rewritten as one of more.

    Args:
        layer: weights and geometry; not dilated.
    """

    def __init__(self, layer: FoldedLayer) -> None:
        kernel, stride, padding = layer.weight.shape[2], layer.stride[0], layer.padding[0]
        self.original = layer
        whole = stride == 1 and kernel * kernel * layer.weight.shape[1] <= MOST_VALUES
        self.size = kernel if whole else stride
        self.stride = stride
        # Patches start at multiples of their size from the first pixel that is there.
        self.padding = padding if whole else -(-padding // stride) * stride
        before = self.padding - padding
        self.taps = 1 if whole else -(-(before + kernel) // stride)
        after = self.taps * self.size - kernel - before
        weight = F.pad(layer.weight, (before, after, before, after))
        values = self.size**2 * weight.shape[1]
        self.values = -(-values // MULTIPLE) * MULTIPLE
        weight = _squares_as_channels(weight, self.size)
        weight = F.pad(weight, (0,) * 4 + (0, self.values - values))
        self.layer = replace(
            layer,
            weight=weight.contiguous(memory_format=torch.channels_last),
            stride=(1, 1),
            padding=(0, 0),
        )

    @staticmethod
    def takes(layer: FoldedLayer) -> bool:
        """Whether a layer is such a convolution, on a GPU and in half precision."""
        on_matrix_unit = channel_multiple(layer.weight.device, layer.weight.dtype) > 1
        if not (layer.is_conv and on_matrix_unit and has_triton()):
            return False
        few = (
            layer.groups == 1
            and layer.weight.shape[1] <= MOST_INPUTS
            and set(layer.dilation) == {1}
        )
        return few and all(
            len(set(pair)) == 1 for pair in (layer.weight.shape[2:], layer.stride, layer.padding)
        )

    def patches_of(self, x_BCHW: Tensor) -> Tensor:
        """The input of the rewritten convolution, from images in any memory format and dtype."""
        from deepmoe.sparse.triton_kernels import patches

        height, width = self.original.output_size(x_BCHW.shape[-2], x_BCHW.shape[-1])
        return patches(
            x_BCHW,
            size=self.size,
            stride=self.stride,
            padding=self.padding,
            grid=(height + self.taps - 1, width + self.taps - 1),
            values=self.values,
            dtype=self.layer.weight.dtype,
        )


def channel_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """Widths that are no multiple of it leave a matrix unit, if there is one, half idle."""
    return MULTIPLE if device.type == "cuda" and is_half(dtype) else 1


@cache
def has_triton() -> bool:
    """Not every build of PyTorch comes with Triton."""
    return find_spec("triton") is not None


def _squares_as_channels(weight_OIKK: Tensor, size: int) -> Tensor:
    """Weights for patches, whose channels are in the order of row, column and input channel."""
    outputs, inputs, kernel, _ = weight_OIKK.shape
    taps = kernel // size
    split = weight_OIKK.reshape(outputs, inputs, taps, size, taps, size)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(outputs, size * size * inputs, taps, taps)
