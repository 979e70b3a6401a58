"""A narrow network in the embedding's place: dearer than a shallow one, and right more often."""

import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.graph import Graph
from deepmoe.graph.capture import one_tensor
from deepmoe.ops import at_least_single


class NetworkEmbedding(nn.Module):
    """A classifier that looks at the image before the base network does.

    Its class probabilities are the mixture weights. It answers the images that it is sure of; for
    others it was in vain, which pays where the base network costs several times as much.

    Args:
        network: gives class logits; its weights are its own.
        graph: of the network.
        kept: channels that it has left of each group of the base network; `None` for all.
        task_gradient: whether it also learns through what is made of the mixture weights.
    """

    form = "network"
    widths = None
    shrink = 1

    def __init__(
        self,
        network: nn.Module,
        graph: Graph,
        *,
        kept: tuple[int, ...] | None = None,
        task_gradient: bool = True,
    ) -> None:
        super().__init__()
        self.network = network
        self.graph = graph
        self.kept = kept
        self.task_gradient = task_gradient
        self.dim = graph.classes

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mixture weights e_BD (on the simplex) and the class logits of L_e."""
        return self.mix(one_tensor(self.network(x_BCHW)))

    def mix(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The same, from what the network gives."""
        e_BD = F.softmax(at_least_single(logits), dim=-1)
        return e_BD if self.task_gradient else e_BD.detach(), logits

    def macs(self, height: int, width: int) -> int:
        """MACs of one image of this size."""
        size = (height, width)
        return sum(self.graph.macs(size).values()) + self.graph.other_macs(size)
