"""Hard MoE: whole networks as experts, of which each image runs one (Gross et al., 2017).

Which one is decided before any of them is trained: k-means of a trained network's features cuts the
images into clusters, and each cluster has an expert of its own. So an image costs the network that
makes the features, the distances to all centroids, and one expert.
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepmoe.config import ModelConfig
from deepmoe.config_checks import check_experts
from deepmoe.errors import UserError
from deepmoe.graph import Gating, Graph
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.network_embedding import FeatureNetwork
from deepmoe.ops import at_least_single


class HardMoE(DeepMoE):
    """Experts of one shape, and a frozen network whose features say which one an image runs.

    Args:
        features: takes the embedding's place.
        experts: networks of one shape, each with weights of its own.
        centroids: of the clusters, one row an expert.
        gating: of every expert; without gates.
        source: what an expert is made of, and how many there are, for checkpoints.
        unpruned: as of `DeepMoE`.
    """

    embedding: FeatureNetwork
    network: nn.ModuleList
    centroids: Tensor
    same_for_all = False

    def __init__(
        self,
        features: FeatureNetwork,
        experts: nn.ModuleList,
        centroids: Tensor,
        gating: Gating,
        source: ModelConfig | None = None,
        unpruned: Graph | None = None,
    ) -> None:
        super().__init__(features, None, experts, gating, source=source, unpruned=unpruned)
        self.register_buffer("centroids", centroids)

    @property
    def one_network(self) -> nn.Module:
        """The first expert: all are of the same shape."""
        return self.network[0]

    @property
    def has_centroids(self) -> bool:
        """Whether they are learnt: before, all are zero."""
        return bool(self.centroids.any())

    def routing_modules(self) -> list[nn.Module]:
        """None: the features never learn, in no stage."""
        return []

    def cluster(self, x_BCHW: Tensor) -> Tensor:
        """The number of each image's expert."""
        return nearest(self.embedding(x_BCHW), self.centroids)

    def forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        if torch.compiler.is_exporting():
            raise UserError(
                "which expert runs depends on the image: deepmoe.deploy.ExpertNetworks can be "
                "exported, for one image at a time"
            )
        clusters_B = self.cluster(x_BCHW)
        order = clusters_B.argsort(stable=True)
        counts = clusters_B.bincount(minlength=len(self.centroids)).tolist()
        parts = [
            self._run_expert(expert, x_BCHW.index_select(0, images))
            for expert, images in zip(self.network, order.split(counts), strict=True)
            if len(images)
        ]
        return DeepMoEOutput(torch.cat(parts).index_select(0, order.argsort()), None, None)

    def _run_expert(self, expert: nn.Module, x_BCHW: Tensor) -> Tensor:
        # One image says nothing about how images differ, and where a layer has one position left
        # there is no variance at all: the expert then norms by what it knows of its cluster so far,
        # as in evaluation, and learns from the image all the same.
        alone = self.training and len(x_BCHW) == 1
        with _norms_as_in_evaluation(expert) if alone else contextlib.nullcontext():
            return self.gating(expert, x_BCHW, None)


def nearest(features_BD: Tensor, centroids_KD: Tensor) -> Tensor:
    """The centroid with the least (squared) distance to each vector; the first of several."""
    features_BD = at_least_single(features_BD)
    centroids_KD = centroids_KD.to(features_BD.dtype)
    # By differences: products lose the digits that count where features are far from zero.
    direct = "donot_use_mm_for_euclid_dist"
    return torch.cdist(features_BD, centroids_KD, compute_mode=direct).argmin(dim=1)


def add_experts(network: nn.Module, gating: Gating, source: ModelConfig) -> HardMoE:
    """Experts that all start as copies of a network, and the network itself to tell images apart.

    Until centroids are learnt, all of them are zero, and images run the first expert.

    Args:
        network: trained, or of that shape. It becomes the first expert.
        gating: of the network.
        source: what it is made of, and how many experts there are to be.

    Raises:
        UserError: for a number of experts that is out of range, gates or exits besides, or a
            network without features.
    """
    check_experts(source)
    assert source.experts is not None
    features = FeatureNetwork(network, gating.graph)
    others = (copy.deepcopy(network) for _ in range(source.experts - 1))
    like = next(network.parameters())
    centroids = torch.zeros(source.experts, features.dim, dtype=like.dtype, device=like.device)
    model = HardMoE(features, nn.ModuleList([network, *others]), centroids, gating, source)
    model.training = network.training  # each module of an expert keeps its own mode
    return model


def refuse_experts(model: DeepMoE, why: str) -> None:
    """Tells why something can't be done with experts, in one sentence."""
    if isinstance(model, HardMoE):
        raise UserError(f"the model is made of experts, one of which runs for an image: {why}")


@contextlib.contextmanager
def _norms_as_in_evaluation(network: nn.Module) -> Iterator[None]:
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
