"""What a program asks for: layers, norms and gates, of all channels or of a fixed choice."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.graph.running import Site, gates_at, multiply
from deepmoe.layers import Gates
from deepmoe.ops import scale_channels
from deepmoe.sparse.convolution import Convolution, cudnn_runs
from deepmoe.sparse.few_inputs import channel_multiple
from deepmoe.sparse.folding import Affine, FoldedLayer, Side
from deepmoe.sparse.program import Program


class Executor(Protocol):
    """What runs at the layers of a program, which are named by their paths."""

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        """A convolution with its norm and ReLU, and a gate that multiplies its output."""

    def convolve_onto(self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor) -> Tensor:
        """Adds a convolution to something, then ReLU if there is one."""

    def linear(self, path: str, x: Tensor) -> Tensor:
        """A linear layer, over the last dimension."""

    def norm(self, path: str, x_BCHW: Tensor) -> Tensor:
        """A batch norm that stands alone."""

    def parameter(self, name: str) -> Tensor:
        """A parameter with a value for each channel."""

    def gate(self, site: int, x: Tensor) -> Tensor:
        """The input of a layer, multiplied by its gates."""

    def max_pool(self, x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
        """Max pooling over squares."""
        return self.max_pool_gated(x_BCHW, size, stride, padding, None)

    def convolve_and_pool(self, path: str, x_BCHW: Tensor, size: int, stride: int) -> Tensor:
        """A convolution with all that belongs to it, then max pooling."""
        return self.max_pool(self.convolve(path, x_BCHW), size, stride)

    def max_pool_gated(
        self, x_BCHW: Tensor, size: int, stride: int, padding: int, gate_BC: Tensor | None
    ) -> Tensor:
        """Max pooling, the maxima multiplied by gates."""
        if not cudnn_runs(x_BCHW):
            return scale_channels(F.max_pool2d(x_BCHW, size, stride, padding), gate_BC)
        from deepmoe.sparse import triton_kernels

        x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        return triton_kernels.max_pool(x_BCHW, size, stride, padding, gate_BC)


class Parts(NamedTuple):
    """What a program asks for, by path or name."""

    layers: dict[str, FoldedLayer]
    norms: dict[str, Affine]
    parameters: dict[str, Tensor]


class FixedExecutor(Executor):
    """Runs layers as they are, without gates."""

    def __init__(self, parts: Parts) -> None:
        layers = parts.layers
        self.convolutions = {p: Convolution(layer) for p, layer in layers.items() if layer.is_conv}
        self.linears = {p: layer for p, layer in layers.items() if not layer.is_conv}
        self.norms = parts.norms
        self.parameters = parts.parameters
        weights = [layer.weight for layer in layers.values()]
        self.bytes = sum(weight.numel() * weight.element_size() for weight in weights)

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        return self.convolutions[path](x_BCHW)

    def convolve_onto(self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor) -> Tensor:
        return self.convolutions[path](x_BCHW, stream_BCHW)

    def linear(self, path: str, x: Tensor) -> Tensor:
        return F.linear(x, self.linears[path].weight, self.linears[path].bias)

    def norm(self, path: str, x_BCHW: Tensor) -> Tensor:
        return self.norms[path](x_BCHW)

    def parameter(self, name: str) -> Tensor:
        return self.parameters[name]

    def gate(self, site: int, x: Tensor) -> Tensor:
        return x


def whole_network(program: Program) -> Parts:
    """All channels, without gates."""
    parameters = {name: p.value for name, p in program.parameters.items()}
    return Parts(program.layers, program.norms, parameters)


class BesideFixed(Executor):
    """Leaves to layers as they are what it does not do itself."""

    def __init__(self, fixed: FixedExecutor) -> None:
        self.fixed = fixed

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        return self.fixed.convolve(path, x_BCHW)

    def convolve_onto(self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor) -> Tensor:
        return self.fixed.convolve_onto(path, x_BCHW, stream_BCHW)

    def linear(self, path: str, x: Tensor) -> Tensor:
        return self.fixed.linear(path, x)

    def norm(self, path: str, x_BCHW: Tensor) -> Tensor:
        return self.fixed.norm(path, x_BCHW)

    def parameter(self, name: str) -> Tensor:
        return self.fixed.parameter(name)

    def gate(self, site: int, x: Tensor) -> Tensor:
        return self.fixed.gate(site, x)


class MaskedExecutor(BesideFixed):
    """Runs all channels and multiplies them by the gates: dense, whatever the gates are."""

    def __init__(self, fixed: FixedExecutor, sites: Sequence[Site | None], gates: Gates) -> None:
        super().__init__(fixed)
        self.sites = sites
        self.gates = gates

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        return self.fixed.convolutions[path](x_BCHW, gate_BC=self._scale(path))

    def convolve_and_pool(self, path: str, x_BCHW: Tensor, size: int, stride: int) -> Tensor:
        # A gate is not negative, so that it may as well multiply the maxima: there are fewer.
        convolved = self.fixed.convolve(path, x_BCHW)
        return self.max_pool_gated(convolved, size, stride, 0, self._scale(path))

    def gate(self, site: int, x: Tensor) -> Tensor:
        return multiply(self.sites[site], self.gates, x)

    def _scale(self, path: str) -> Tensor | None:
        number = self.fixed.convolutions[path].layer.scale
        return None if number is None else self.gates[number]


def parts_of_route(program: Program, gates: Sequence[Tensor]) -> Parts:
    """The active channels of one route alone, and the gates in the weights that read them."""
    weight = next(iter(program.layers.values())).weight
    multiple = channel_multiple(weight.device, weight.dtype)
    selection = Selection([with_idle(g != 0, multiple) for g in gates], [len(g) for g in gates])
    rows = [g[None] for g in gates]
    layers = {}
    for number, (path, layer) in enumerate(program.layers.items()):
        small = layer.take(selection(layer.outs), selection(layer.ins))
        site = program.sites[number]
        if site is not None:
            factor = gates_at(site, rows)[0].to(weight.dtype)
            taken = selection(layer.ins)
            factor = factor if taken is None else factor.index_select(0, taken)
            factor = factor.view(1, -1, *[1] * (small.weight.dim() - 2))
            small = replace(small, weight=small.weight * factor)
        layers[path] = replace(small, scale=None)
    norms = {path: norm.take(selection(norm.channels)) for path, norm in program.norms.items()}
    parameters = {
        name: parameter.take(selection(parameter.channels))
        for name, parameter in program.parameters.items()
    }
    return Parts(layers, norms, parameters)


class Selection:
    """Which channels of each layer run, from the units of each gated group that do.

    Args:
        active: numbers of the running units of each gated group.
        widths: how many each has.
    """

    def __init__(self, active: Sequence[Tensor], widths: Sequence[int]) -> None:
        self.active = active
        self.widths = widths
        self.found: dict[int, Tensor] = {}
        self.runs: Tensor | None = None

    def __call__(self, side: Side) -> Tensor | None:
        """Numbers of the running channels; `None` for all of them."""
        if side is None or isinstance(side, int):
            return None if side is None else self.active[side]
        if id(side) not in self.found:
            runs = self._runs()
            self.found[id(side)] = runs[side.to(runs.device)].nonzero().flatten()
        return self.found[id(side)]

    def _runs(self) -> Tensor:
        """Whether each unit of all groups runs; the last entry is for channels without a gate."""
        if self.runs is None:
            device = self.active[0].device
            self.runs = torch.zeros(sum(self.widths) + 1, dtype=torch.bool, device=device)
            start = 0
            for active, width in zip(self.active, self.widths, strict=True):
                self.runs[start + active] = True
                start += width
            self.runs[-1] = True
        return self.runs


def with_idle(active_C: Tensor, multiple: int) -> Tensor:
    """The active units, and as many others (whose gates make them zero) as make a multiple.

    There is always one: layers without channels are more trouble than they are worth.
    """
    on, off = active_C.nonzero().flatten(), (~active_C).nonzero().flatten()
    idle = -len(on) % multiple if len(on) else multiple
    return torch.cat([on, off[:idle]]).sort().values
