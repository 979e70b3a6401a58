"""A network in the embedding's place: a narrow one that answers, or a trained one's features."""

import copy
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.graph import Gating, Graph, without_classifier
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


class FeatureNetwork(nn.Module):
    """A trained network without its classifier, frozen: what its classifier read are features.

    It never learns, and its norms are in evaluation mode also while others train: an image has the
    same features at all times.

    Args:
        network: gives class logits; it is copied.
        graph: of the network.

    Raises:
        UserError: for a network without a linear classifier of one vector an image.
    """

    form = "features"
    widths = None
    shrink = 1
    task_gradient = False

    def __init__(self, network: nn.Module, graph: Graph) -> None:
        super().__init__()
        self.graph = without_classifier(graph)
        self.gating = Gating(self.graph, ())
        self.dim = self.graph.classes
        self.network = copy.deepcopy(network)
        # Nobody asks it: its weights would be counted and kept for nothing.
        self.network.set_submodule(graph.layers[-1].path, nn.Identity())
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stays in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Returns the features, one vector an image."""
        return self.gating(self.network, x_BCHW, None)

    def macs(self, height: int, width: int) -> int:
        """MACs of one image of this size."""
        size = (height, width)
        return sum(self.graph.macs(size).values()) + self.graph.other_macs(size)
