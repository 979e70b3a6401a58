"""Each code of a route codebook as a small network of its own; a batch is grouped by code."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from deepmoe.backbones import Backbone
from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.graphs import GraphCache, Work
from deepmoe.sparse.runners import SmallNetwork


class CodeNetworks:
    """The small networks of all codes, made on first use and kept under a memory limit.

    Args:
        backbone: how the layers are connected.
        layers: of the whole network.
        codes: for each gated convolution, the gates of all codes.
        memory_limit: in bytes; beyond it, the network used least recently is dropped.
        graphs: captures and runs networks on a GPU; `None` elsewhere.
    """

    def __init__(
        self,
        backbone: Backbone,
        layers: Mapping[str, FoldedLayer],
        codes: Sequence[Tensor],
        memory_limit: int | None,
        graphs: GraphCache | None,
    ) -> None:
        self.backbone = backbone
        self.layers = layers
        self.codes = codes
        self.numbers = torch.arange(len(codes[0]), device=codes[0].device)
        self.memory_limit = memory_limit
        self.graphs = graphs
        self.networks: OrderedDict[int, SmallNetwork] = OrderedDict()

    def sort(self, x_BCHW: Tensor, codes_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts features of images by code. The shapes are fixed, so that it can be captured.

        Returns:
            The features sorted, which images they are of, and how many images take each code.
        """
        images = codes_B.argsort(stable=True)
        counts = (codes_B[:, None] == self.numbers).sum(dim=0)
        return _images_of(x_BCHW, images), images, counts

    def __call__(self, x_BCHW: Tensor, counts: list[int], size: tuple[int, int]) -> Tensor:
        """Logits in the order of the features, each by the network of its code.

        Args:
            x_BCHW: features, sorted by code.
            counts: how many take each code.
            size: of the images they are of.
        """
        parts = [(code, x) for code, x in enumerate(x_BCHW.split(counts)) if len(x)]
        if self.graphs is None:
            return torch.cat([self.network_of(code)(x, size) for code, x in parts])
        works = []
        for code, x in parts:
            network = partial(self.network_of(code), size=size)
            works.append(Work((code, size), network, (x,), owner=code))
        return torch.cat(self.graphs.run_all(works))

    def network_of(self, code: int) -> SmallNetwork:
        """The network of a code, from the cache or made anew."""
        if code not in self.networks:
            gates = [g[code] for g in self.codes]
            self.networks[code] = SmallNetwork(self.backbone, self.layers, gates)
        self.networks.move_to_end(code)
        self._make_room()
        return self.networks[code]

    @property
    def bytes(self) -> int:
        """Memory of the networks that are there now."""
        return sum(network.bytes for network in self.networks.values())

    def _make_room(self) -> None:
        while (
            self.memory_limit is not None
            and len(self.networks) > 1
            and self.bytes > self.memory_limit
        ):
            dropped, _ = self.networks.popitem(last=False)
            if self.graphs is not None:
                self.graphs.forget(owner=dropped)


def _images_of(x_BCHW: Tensor, images: Tensor) -> Tensor:
    """Some images of a batch in its memory format, which `index_select` alone would not keep."""
    if x_BCHW.is_contiguous():
        return x_BCHW.index_select(0, images)
    return x_BCHW.permute(0, 2, 3, 1).index_select(0, images).permute(0, 3, 1, 2)
