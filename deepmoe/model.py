"""DeepMoE: embedding, gate heads and base network, joined."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from deepmoe.backbones import Backbone
from deepmoe.layers import GateHeads, Gates, NoisyTopKHeads, RouteCodebook, ShallowEmbedding


class DeepMoEOutput(NamedTuple):
    """What a forward pass gives; the last two are `None` for a dense network."""

    logits: Tensor
    embedding_logits: Tensor | None
    gates: Gates | None


# Lets torch.export.save write down the type of the output.
_pytree._register_namedtuple(DeepMoEOutput, serialized_type_name="deepmoe.DeepMoEOutput")


class DeepMoE(nn.Module):
    """A base network whose channels an embedding of the image switches and scales.

    Gates are passed as arguments and returned, never kept on a layer. Without embedding and heads
    it is the dense twin: the same base network, losses and training loop. With a codebook, the
    gates of an image are those of the nearest of its codes.

    Args:
        embedding: looks at the image.
        heads: make gates from its answer.
        backbone: the base network.
        codebook: of routes, if images are to share a few of them.
        thresholds: one a channel, all layers side by side; gates below are closed.
    """

    thresholds: Tensor | None

    def __init__(
        self,
        embedding: ShallowEmbedding | None,
        heads: GateHeads | NoisyTopKHeads | None,
        backbone: Backbone,
        codebook: RouteCodebook | None = None,
        thresholds: Tensor | None = None,
    ) -> None:
        super().__init__()
        if (embedding is None) != (heads is None):
            raise ValueError("embedding and heads go together: give both, or neither")
        if codebook is not None and heads is None:
            raise ValueError("a codebook needs gates to replace: give embedding and heads too")
        self.embedding = embedding
        self.heads = heads
        self.backbone = backbone
        self.codebook = codebook
        self.register_buffer("thresholds", thresholds)

    @property
    def gated(self) -> bool:
        """False for a dense network."""
        return self.embedding is not None

    def placed(self, x_BCHW: Tensor) -> Tensor:
        """Images where the model is, in its precision."""
        return x_BCHW.to(next(self.parameters()))

    def route(self, x_BCHW: Tensor) -> tuple[Gates | None, Tensor | None]:
        """The gates of every layer and the embedding's class logits, before the base network."""
        if self.embedding is None or self.heads is None:
            return None, None
        e_BD, embedding_logits = self.embedding(x_BCHW)
        gates = self.gates_side_by_side(e_BD).split(self.backbone.gate_widths, dim=1)
        if self.codebook is not None:
            gates = self.codebook(gates)
        return gates, embedding_logits

    def gates_side_by_side(self, e_BD: Tensor) -> Tensor:
        """What the heads make of mixture weights, for all layers as one tensor."""
        assert self.heads is not None
        g_BC = self.heads.side_by_side(e_BD)
        return g_BC if self.thresholds is None else close_small(g_BC, self.thresholds)

    def forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        gates, embedding_logits = self.route(x_BCHW)
        return DeepMoEOutput(self.backbone(x_BCHW, gates), embedding_logits, gates)

    def routing_modules(self) -> list[nn.Module]:
        """What the fine-tune stage freezes: the embedding network and the heads."""
        return [m for m in (self.embedding, self.heads) if m is not None]


def close_small(gates: Tensor, thresholds: Tensor) -> Tensor:
    """Gates below their thresholds become zero, others stay as they are."""
    # Closed ones are left alone: heads may give them a gradient, by which they open again.
    return torch.where((gates >= thresholds) | (gates <= 0), gates, 0.0)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
