"""A mixture of experts, as inference runs it: each expert on the images of its cluster alone."""

import copy

import torch
from torch import Tensor, nn

from deepmoe.hard_moe import HardMoE, nearest
from deepmoe.model import DeepMoEOutput
from deepmoe.sparse.code_networks import CodeNetworks
from deepmoe.sparse.embedding import FoldedNetwork
from deepmoe.sparse.inference import InferenceModel
from deepmoe.sparse.route_groups import in_order


class SparseExperts(InferenceModel, HardMoE):
    """See `sparsify`.

    An expert is to its cluster what the small network of a code is to the images that take it.
    """

    @torch.no_grad()
    def __init__(self, model: HardMoE, dtype: torch.dtype) -> None:
        super().__init__(
            copy.deepcopy(model.embedding),
            nn.ModuleList(),  # folded ones take their place
            model.centroids.clone(),
            model.gating,
            unpruned=model.unpruned,
        )
        device = model.centroids.device
        self.set_up(device)
        graph = model.gating.graph
        self.features = FoldedNetwork(model.embedding.network, model.embedding.graph, dtype)
        folded = [FoldedNetwork(expert, graph, dtype) for expert in model.network]
        self.experts = CodeNetworks(
            folded.__getitem__, len(folded), device, memory_limit=None, graphs=self.graphs
        )
        self.eval()

    def _forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        x_BCHW, images, counts = self._run("prepare", self._sort, x_BCHW)
        size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
        logits = self.experts(x_BCHW, counts.tolist(), size)
        return DeepMoEOutput(in_order(logits, images), None, None)

    def _sort(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images sorted by cluster, and how to undo that."""
        clusters_B = nearest(self.features(x_BCHW), self.centroids)
        return self.experts.sort(x_BCHW, clusters_B)
