"""The shallow embedding network, as inference runs it."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepmoe.layers import ConvNormReLU, ShallowEmbedding
from deepmoe.ops import is_half
from deepmoe.sparse.convolution import Convolution, cudnn_runs
from deepmoe.sparse.folding import fold, norm_as_affine

GEOMETRY = {"stride": (2, 2), "padding": (1, 1)}


class FastEmbedding:
    """Gives the mixture weights and class logits that the embedding network gives.

    Args:
        embedding: in evaluation mode.
        dtype: of the convolutions. In half precision, values are rounded where the embedding
            network itself rounds them under autocast: an image must not take another route here.
    """

    def __init__(self, embedding: ShallowEmbedding, dtype: torch.dtype) -> None:
        self.embedding = embedding
        self.dtype = dtype
        self.own = embedding.project.weight.dtype
        self.mixed = dtype != self.own and is_half(dtype)
        convs = [conv for conv in embedding.convs if isinstance(conv, ConvNormReLU)]
        self.steps: list[Callable[[Tensor], Tensor]] = []
        if dtype == self.own:
            self.steps = [
                Convolution(fold(conv.conv, conv.bn, dtype, activation="relu", **GEOMETRY))
                for conv in convs
            ]
        elif self.mixed and cudnn_runs(embedding.project.weight.to(dtype)):
            self.steps = [_RoundedConvolution(conv, dtype) for conv in convs]

    def __call__(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mixture weights e_BD and class logits, from images in any memory format."""
        with torch.autocast(x_BCHW.device.type, self.dtype, enabled=self.mixed):
            if not self.steps:
                return self.embedding(x_BCHW.to(self.own))
            # In mixed precision, the first step takes images as they are.
            y_BCHW = x_BCHW if self.mixed else x_BCHW.to(self.dtype)
            for step in self.steps:
                y_BCHW = step(y_BCHW)
            return self.embedding.mix(y_BCHW)


class _RoundedConvolution:
    """Convolution, then batch norm and ReLU in one pass; rounded after each of the two."""

    def __init__(self, module: ConvNormReLU, dtype: torch.dtype) -> None:
        self.convolution = Convolution(fold(module.conv, None, dtype, **GEOMETRY))
        self.scale, self.bias = (t.float() for t in norm_as_affine(module.bn))

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        from deepmoe.sparse.triton_kernels import finish_

        y_BCHW = self.convolution(x_BCHW).contiguous(memory_format=torch.channels_last)
        return finish_(y_BCHW, scale=self.scale, bias=self.bias, relu=True)
