"""A graph run for the shapes of its values."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from deepmoe.graph.operations import COPYING, NORMS, PAIRWISE, POINTWISE, name_of

BATCH = 2  # images, as which numbers are sent
SAME_SHAPE = NORMS | POINTWISE - COPYING


def blank(colours: int, size: tuple[int, int]) -> Tensor:
    """A batch of images without values, as skeletons take it: in single precision.

    Whoever trains in double precision has made that the default.
    """
    return torch.empty(BATCH, colours, *size, device="meta", dtype=torch.float32)


class Shapes(fx.Interpreter):
    """Runs a graph for its shapes alone; on the meta device, where nothing is computed."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False  # what is told to a user is one sentence
        self.root = root
        self.names = {n: name_of(n, root) for n in graph.nodes if n.op.startswith("call")}

    def run_node(self, n: fx.Node) -> Any:
        # Shapes stay what they are, and batch norm takes its time even without values.
        name = self.names.get(n)
        if name in SAME_SHAPE and isinstance(n.args[0], fx.Node):
            return self.env[n.args[0]]
        if name in PAIRWISE and len(n.args) == 2 and not n.kwargs:
            one, other = (self.env.get(a) if isinstance(a, fx.Node) else None for a in n.args)
            if _is_like(one, other):
                return one
        return super().run_node(n)


def _is_like(one: Any, other: Any) -> bool:
    """Whether two values are tensors of one form, which what is made of them has as well."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    plain = one.is_floating_point() and one.is_contiguous()
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return plain and alike
