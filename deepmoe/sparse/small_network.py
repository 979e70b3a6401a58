"""The network of one route, as small as the route is."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from deepmoe.sparse.chain import StaticNetwork
from deepmoe.sparse.executors import Executor, FixedExecutor, parts_of_route
from deepmoe.sparse.planner import Planner
from deepmoe.sparse.program import Program


class SmallNetwork:
    """The physically small network of one route, its gates folded into the weights.

    It starts behind the layers that are the same for all routes.

    Args:
        program: of the whole network.
        gates: of the route: for each gated group a vector, zero where a unit is off.
        planner: chooses between ways to run it, for all routes alike.
    """

    def __init__(self, program: Program, gates: Sequence[Tensor], planner: Planner[Any]) -> None:
        self.program = program
        self.parts = parts_of_route(program, gates)
        self.executor = FixedExecutor(self.parts)
        self.planner = planner
        self.networks: dict[tuple[int, int], StaticNetwork] = {}  # by the size of images

    @property
    def bytes(self) -> int:
        """Memory of the weights, and of what runs them."""
        return self.executor.bytes + sum(network.bytes for network in self.networks.values())

    def __call__(self, x_BCHW: Tensor, size: tuple[int, int]) -> Tensor:
        """Logits, from what the first layers give for images of this size."""
        if size not in self.networks:
            run = partial(_go_on, self.program, size)
            layers, planner = self.parts.layers, self.planner
            self.networks[size] = StaticNetwork("code", run, layers, self.executor, planner)
        return self.networks[size](x_BCHW)


def _go_on(program: Program, size: tuple[int, int], executor: Executor, x_BCHW: Tensor) -> Tensor:
    return program.go_on(executor, x_BCHW, size)
