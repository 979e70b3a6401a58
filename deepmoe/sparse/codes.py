"""Each code of a route codebook as a small network of its own; a batch is grouped by code."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from torch import Tensor

from deepmoe.backbones import Backbone
from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.graphs import GraphCache, Work
from deepmoe.sparse.runners import SmallNetwork, images_by_number, in_order


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
        self.memory_limit = memory_limit
        self.graphs = graphs
        self.networks: OrderedDict[int, SmallNetwork] = OrderedDict()

    def __call__(self, x_BCHW: Tensor, codes: Tensor) -> Tensor:
        """Logits of images, each by the network of its code."""
        groups = images_by_number(codes)
        if len(groups) == 1:
            return self._run_all([(next(iter(groups)), x_BCHW)])[0].clone()
        work = [(code, _images_of(x_BCHW, images)) for code, images in groups.items()]
        return in_order(self._run_all(work), list(groups.values()))

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

    def _run_all(self, work: list[tuple[int, Tensor]]) -> list[Tensor]:
        if self.graphs is None:
            return [self.network_of(code)(x) for code, x in work]
        return self.graphs.run_all([Work(code, self.network_of(code), (x,)) for code, x in work])

    def _make_room(self) -> None:
        while (
            self.memory_limit is not None
            and len(self.networks) > 1
            and self.bytes > self.memory_limit
        ):
            code, _ = self.networks.popitem(last=False)
            if self.graphs is not None:
                self.graphs.forget(code)


def _images_of(x_BCHW: Tensor, images: Tensor) -> Tensor:
    """Some images of a batch in its memory format, which `index_select` alone would not keep."""
    if x_BCHW.is_contiguous():
        return x_BCHW.index_select(0, images)
    return x_BCHW.permute(0, 2, 3, 1).index_select(0, images).permute(0, 3, 1, 2)
