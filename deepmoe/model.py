"""DeepMoE: embedding, gate heads and base network, joined."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from deepmoe.backbones import Backbone
from deepmoe.errors import UserError
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
        thresholds: one for each channel of all layers; gates below are closed. Checkpoints that
            earlier versions have cut hold some.
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

    def as_input(self, x_BCHW: Tensor) -> Tensor:
        """Images where the model is, in its precision."""
        return x_BCHW.to(next(self.parameters()))

    def route(self, x_BCHW: Tensor) -> tuple[Gates | None, Tensor | None]:
        """The gates of every layer and the embedding's class logits, before the base network."""
        if self.embedding is None or self.heads is None:
            return None, None
        e_BD, embedding_logits = self.embedding(x_BCHW)
        gates = self.concatenated_gates(e_BD).split(self.backbone.gate_widths, dim=1)
        if self.codebook is not None:
            gates = self.codebook(gates)
        return gates, embedding_logits

    def concatenated_gates(self, e_BD: Tensor) -> Tensor:
        """What the heads make of mixture weights, for all layers as one tensor."""
        assert self.heads is not None
        g_BC = self.heads.concatenated(e_BD)
        return g_BC if self.thresholds is None else close_small(g_BC, self.thresholds)

    def forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        gates, embedding_logits = self.route(x_BCHW)
        return DeepMoEOutput(self.backbone(x_BCHW, gates), embedding_logits, gates)

    def check_finite(self) -> None:
        """Refuses weights, and statistics of batch norms, that are not finite."""
        tensors = {n: t for n, t in self.state_dict().items() if t.is_floating_point()}
        finite = torch.stack([t.isfinite().all() for t in tensors.values()]).tolist()
        wrong = [name for name, good in zip(tensors, finite, strict=True) if not good]
        if wrong:
            raise UserError(f"the model can't be used: {wrong[0]} has values that are not finite")

    def routing_modules(self) -> list[nn.Module]:
        """What the fine-tune stage freezes: the embedding network and the heads."""
        return [m for m in (self.embedding, self.heads) if m is not None]


def close_small(gates: Tensor, thresholds: Tensor) -> Tensor:
    """Gates below their thresholds become zero, others stay as they are."""
    return torch.where(gates >= thresholds, gates, 0.0)


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
