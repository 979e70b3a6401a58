"""What looks at the image first, as inference runs it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepmoe.graph import Gating, Graph
from deepmoe.layers import ConvNormReLU, ShallowEmbedding
from deepmoe.model import Embedding
from deepmoe.network_embedding import NetworkEmbedding
from deepmoe.ops import is_half
from deepmoe.sparse.chain import StaticNetwork
from deepmoe.sparse.convolution import Convolution, cudnn_runs
from deepmoe.sparse.executors import Executor, FixedExecutor, Parts, whole_network
from deepmoe.sparse.folding import fold, norm_as_affine
from deepmoe.sparse.planner import Planner
from deepmoe.sparse.translation import translate

GEOMETRY = {"stride": (2, 2), "padding": (1, 1)}


def fast_embedding(
    embedding: Embedding, dtype: torch.dtype, planner: Planner[Any]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function that gives the mixture weights and class logits that an embedding gives.

    Args:
        embedding: in evaluation mode.
        dtype: to run in.
        planner: chooses between ways to run it.
    """
    if isinstance(embedding, NetworkEmbedding):
        return FastNetwork(embedding, dtype, planner)
    assert isinstance(embedding, ShallowEmbedding)
    return FastEmbedding(embedding, dtype, planner)


class FoldedNetwork:
    """Gives what a network without gates gives, its norms folded into its layers.

    Args:
        network: which is copied.
        graph: of the network.
        dtype: to run in.
        planner: chooses between ways to run it; `None`, and there is one only.
    """

    def __init__(
        self,
        network: nn.Module,
        graph: Graph,
        dtype: torch.dtype,
        planner: Planner[Any] | None = None,
    ) -> None:
        self.dtype = dtype
        copied, gating, _ = Gating(graph, ()).narrow(network, [])
        program = translate(copied.eval(), gating, dtype)
        self.whole = FixedExecutor(whole_network(program))
        self.run: Callable[[Tensor], Tensor] = partial(program.whole, self.whole)
        if planner is not None:
            self.run = StaticNetwork("first", program.whole, program.layers, self.whole, planner)

    def __call__(self, x_BCHW: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Its output, from images in any memory format; of any size, whatever is said of it."""
        best = torch.channels_last if x_BCHW.is_cuda else torch.preserve_format
        return self.run(x_BCHW.to(self.dtype, memory_format=best))

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        return self.whole.bytes


class FastNetwork:
    """Gives what a narrow network in the embedding's place gives.

    Args:
        embedding: in evaluation mode.
        dtype: to run in.
        planner: chooses between ways to run it.
    """

    def __init__(
        self, embedding: NetworkEmbedding, dtype: torch.dtype, planner: Planner[Any]
    ) -> None:
        self.embedding = embedding
        self.network = FoldedNetwork(embedding.network, embedding.graph, dtype, planner)

    def __call__(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mixture weights e_BD and class logits, from images in any memory format."""
        return self.embedding.mix(self.network(x_BCHW))


class FastEmbedding:
    """Gives the mixture weights and class logits that the embedding network gives.

    Args:
        embedding: in evaluation mode.
        dtype: of the convolutions. In half precision, values are rounded where the embedding
            network itself rounds them under autocast: an image must not take another route here.
        planner: chooses between ways to run the convolutions.
    """

    def __init__(
        self, embedding: ShallowEmbedding, dtype: torch.dtype, planner: Planner[Any]
    ) -> None:
        self.embedding = embedding
        self.dtype = dtype
        self.own = embedding.project.weight.dtype
        self.mixed = dtype != self.own and is_half(dtype)
        convs = [conv for conv in embedding.convs if isinstance(conv, ConvNormReLU)]
        self.steps: list[Callable[[Tensor], Tensor]] = []
        if dtype == self.own:
            layers = {
                str(number): fold(conv.conv, conv.bn, dtype, activation="relu", **GEOMETRY)
                for number, conv in enumerate(convs)
            }
            fixed = FixedExecutor(Parts(layers, {}, {}))
            self.steps = [
                StaticNetwork("embedding", partial(_all_of, layers), layers, fixed, planner)
            ]
        elif self.mixed and cudnn_runs(embedding.project.weight.to(dtype)):
            self.steps = [_RoundedConvolution(conv, dtype) for conv in convs]

    def __call__(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mixture weights e_BD and class logits, from images in any memory format."""
        with self._autocast(x_BCHW.device.type):
            if not self.steps:
                return self.embedding(x_BCHW.to(self.own))
            # In mixed precision, the first step takes images as they are.
            y_BCHW = self.embedding.shrunk(x_BCHW if self.mixed else x_BCHW.to(self.dtype))
            for step in self.steps:
                y_BCHW = step(y_BCHW)
            return self.embedding.mix(y_BCHW)

    def _autocast(self, device: str) -> AbstractContextManager[Any]:
        # To enter it takes as long as a small convolution, for nothing where it is off anyway.
        if not self.mixed and not torch.is_autocast_enabled(device):
            return nullcontext()
        return torch.autocast(device, self.dtype, enabled=self.mixed)


def _all_of(layers: Iterable[str], run: Executor, x_BCHW: Tensor) -> Tensor:
    """One convolution after the other."""
    for path in layers:
        x_BCHW = run.convolve(path, x_BCHW)
    return x_BCHW


class _RoundedConvolution:
    """Convolution, then batch norm and ReLU in one pass; rounded after each of the two."""

    def __init__(self, module: ConvNormReLU, dtype: torch.dtype) -> None:
        self.convolution = Convolution(fold(module.conv, None, dtype, **GEOMETRY))
        self.scale, self.bias = (t.float() for t in norm_as_affine(module.bn))

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        from deepmoe.sparse.triton_kernels import finish_

        y_BCHW = self.convolution(x_BCHW).contiguous(memory_format=torch.channels_last)
        return finish_(y_BCHW, scale=self.scale, bias=self.bias, relu=True)
