"""What the engine runs: two functions that ask an executor for layers, and what these are made of.

Which channels layers, norms, gates and parameters have is the executor's choice. All other
operations are the network's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepmoe.graph.running import Site
from deepmoe.sparse.folding import Affine, FoldedLayer, FollowingParameter


@dataclass(frozen=True)
class Program:
    """What the engine runs.

    Attributes:
        before: (modules, executor, images) -> what the layers before the first gate give.
        after: (modules, executor, that, a tensor with the shape of the images) -> logits.
        modules: of operations that are the network's own.
        layers: by path, in order.
        norms: by path, those that stand alone.
        parameters: by name, those with a value for each channel.
        sites: for numbers that `gate` is called with, which gates multiply what.
        starts_with_convolution: whether images are read by the first layer alone.
    """

    before: Callable[..., Tensor]
    after: Callable[..., Tensor]
    modules: nn.Module
    layers: dict[str, FoldedLayer]
    norms: dict[str, Affine]
    parameters: dict[str, FollowingParameter]
    sites: tuple[Site | None, ...]
    starts_with_convolution: bool
    colours: int

    def start(self, run: Any, x_BCHW: Tensor) -> Tensor:
        """The first layers, as far as they are the same whatever the gates are."""
        return self.before(self.modules, run, x_BCHW)

    def go_on(self, run: Any, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Logits, from what the first layers gave for images of this size."""
        images = features.new_empty(()).expand(len(features), self.colours, *size)
        return self.after(self.modules, run, features, images)

    def whole(self, run: Any, x_BCHW: Tensor) -> Tensor:
        """Logits of images."""
        size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
        return self.go_on(run, self.start(run, x_BCHW), size)
