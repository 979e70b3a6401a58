"""Each code of a route codebook as a small network of its own; a batch is grouped by code."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from deepmoe.cuda_graphs import GraphCache, Work, one_after_another
from deepmoe.sparse.route_groups import images_of

# A captured network serves groups of one size: with fewer sizes it comes up again more often.
MULTIPLE_OF_IMAGES = 4


class RunsOnSome(Protocol):
    """A network that runs on some images of a batch."""

    @property
    def bytes(self) -> int:
        """Memory of the weights."""

    def __call__(self, x_BCHW: Tensor, size: tuple[int, int]) -> Tensor:
        """Logits, from features of images of this size."""


class CodeNetworks:
    """The small networks of all codes, made on first use and kept under a memory limit.

    Args:
        make: gives the network of a code.
        codes: how many there are.
        device: where they run.
        memory_limit: in bytes; beyond it, the network used least recently is dropped.
        graphs: captures and runs networks on a GPU; `None` elsewhere.
    """

    def __init__(
        self,
        make: Callable[[int], RunsOnSome],
        codes: int,
        device: torch.device,
        memory_limit: int | None,
        graphs: GraphCache | None,
    ) -> None:
        self.make = make
        self.numbers = torch.arange(codes, device=device)
        self.memory_limit = memory_limit
        self.graphs = graphs
        self.multiple = 1 if graphs is None else MULTIPLE_OF_IMAGES
        self.networks: OrderedDict[int, RunsOnSome] = OrderedDict()

    def sort(self, x_BCHW: Tensor, codes_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts features of images by code. The shapes are fixed, so that it can be captured.

        Returns:
            The features sorted, and some more of them at the end; which images they are of; how
            many images take each code.
        """
        images = codes_B.argsort(stable=True)
        counts = (codes_B[:, None] == self.numbers).sum(dim=0)
        spare = images[-1:].expand(self.multiple - 1)
        return images_of(x_BCHW, torch.cat([images, spare])), images, counts

    def __call__(self, x_BCHW: Tensor, counts: list[int], size: tuple[int, int]) -> Tensor:
        """Logits in the order of the features, each by the network of its code.

        Args:
            x_BCHW: features, sorted by code, as `sort` gives them.
            counts: how many take each code.
            size: of the images they are of.
        """
        works, start = [], 0
        for code, count in enumerate(counts):
            if count:
                # A group takes some images of the next one along, and drops what they give.
                rounded = -(-count // self.multiple) * self.multiple
                network = partial(self._run, code, size)
                x = x_BCHW[start : start + rounded]
                works.append(Work((code, size), network, (x,), lane=code))
                start += count
        run_all = one_after_another
        if self.graphs is not None and self.memory_limit is None:  # a network stays once captured
            run_all = self.graphs.run_all
        results = zip(run_all(works), (count for count in counts if count), strict=True)
        return torch.cat([logits[:count] for logits, count in results])

    def network_of(self, code: int) -> RunsOnSome:
        """The network of a code, from the cache or made anew."""
        if code not in self.networks:
            self.networks[code] = self.make(code)
        self.networks.move_to_end(code)
        self._make_room()
        return self.networks[code]

    @property
    def bytes(self) -> int:
        """Memory of the networks that are there now."""
        return sum(network.bytes for network in self.networks.values())

    def _run(self, code: int, size: tuple[int, int], x_BCHW: Tensor) -> Tensor:
        return self.network_of(code)(x_BCHW, size)

    def _make_room(self) -> None:
        while (
            self.memory_limit is not None
            and len(self.networks) > 1
            and self.bytes > self.memory_limit
        ):
            self.networks.popitem(last=False)
