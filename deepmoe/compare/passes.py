"""Batches on their way through a network: what layers read and give at a few random positions.

Of what a layer reads, only the rows for these positions are taken.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from deepmoe.compare.readers import Reader
from deepmoe.errors import UserError
from deepmoe.graph import evaluation_mode

POSITIONS = 10  # an image
CHECKED = 64  # rows of a batch
TOLERANCE = 0.02  # of the largest output; convolutions on a GPU may round to 10 bits


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows (S) of one layer in one network: an image and a position each.

    Attributes:
        x_SCK: what the layer reads, at the places of its kernel.
        y_SO: what it gives, less its bias.
        shortcut_SO: what is added to that behind the norm, where something is.
    """

    x_SCK: Tensor
    y_SO: Tensor
    shortcut_SO: Tensor | None


@dataclass(frozen=True, eq=False)
class Held:
    """Where a pass through a network stands: all that nodes from `start` on still read."""

    start: fx.Node
    values: dict[fx.Node, Any]

    @property
    def nbytes(self) -> int:
        """Memory of the values."""
        return sum(v.nbytes for v in self.values.values() if isinstance(v, Tensor))


class Pass(fx.Interpreter):
    """One batch through a network, up to the last thing that readers tell of.

    Args:
        program: the network's operations.
        network: with the weights.
        readers: what samples are taken of.
        positions: where, for each image; those of new readers are drawn and added.
        generator: of the positions.
        held: where to begin.
        cut: the operation before which `at_cut` holds where the pass stands.
    """

    def __init__(
        self,
        program: fx.Graph,
        network: nn.Module,
        readers: Sequence[Reader],
        positions: dict[Reader, Tensor],
        generator: torch.Generator,
        held: Held,
        cut: fx.Node,
    ) -> None:
        super().__init__(network, graph=program)
        self.extra_traceback = False  # leaving early is no error to be told
        self.network, self.readers = network, readers
        self.order = {node: number for number, node in enumerate(program.nodes)}
        self.positions, self.generator = positions, generator
        self.held, self.cut = held, cut
        self.at_cut: Held | None = None
        self.read: dict[Reader, tuple[Tensor, Tensor]] = {}
        self.shapes: dict[Reader, torch.Size] = {}
        self.met: dict[Reader, Tensor | None] = {}

    def samples(self) -> list[Sample]:
        """Of each reader."""
        # Copies: operations may work in place. Of numbers there is nothing to copy.
        like = next(self.network.parameters())
        env = {
            node: value.to(like.device, copy=True) if isinstance(value, Tensor) else value
            for node, value in self.held.values.items()
        }
        with evaluation_mode(self.network), contextlib.suppress(_AllSeen):
            self.run(initial_env=env)
        return [Sample(*self.read[reader], self.met[reader]) for reader in self.readers]

    def run_node(self, n: fx.Node) -> object:
        """Runs an operation, and looks at what it reads and gives."""
        # Weights are looked up anew: layers may have got others.
        if self.order[n] < self.order[self.held.start] and n.op != "get_attr":
            return None
        if n is self.cut and self.held.start is not n:
            self.at_cut = self._hold(n)
        # An addition may work in place: what it adds is looked at before.
        for reader in self.readers:
            if reader.addition is n:
                assert reader.shortcut is not None
                self._meet(reader, self.env[reader.shortcut])
        value = super().run_node(n)
        for reader in self.readers:
            if reader.node is n:
                assert isinstance(n.args[0], fx.Node)
                self._read(reader, self.env[n.args[0]], value)
        if len(self.met) == len(self.readers):
            raise _AllSeen
        return value

    def _hold(self, start: fx.Node) -> Held:
        values = {}
        for node, value in self.env.items():
            needed = any(self.order[user] >= self.order[start] for user in node.users)
            if needed and node.op != "get_attr":
                values[node] = value.clone() if isinstance(value, Tensor) else value
        return Held(start, values)

    def _read(self, reader: Reader, x: Tensor, y: Tensor) -> None:
        module = self.network.get_submodule(reader.path)
        if reader not in self.positions:
            places = y[0].numel() // len(reader.layer.outs)
            drawn = torch.rand(len(y), places, generator=self.generator).argsort(dim=1)
            self.positions[reader] = drawn[:, :POSITIONS].to(y.device)
        at_BP = self.positions[reader]
        if isinstance(module, nn.Conv2d):
            x_SCK, y_SO = _patches(module, x, at_BP, y.shape[3]), _rows(y, at_BP)
        else:
            x_SCK, y_SO = _rows(x.movedim(-1, 1), at_BP)[..., None], _rows(y.movedim(-1, 1), at_BP)
        if isinstance(module.bias, Tensor):
            y_SO = y_SO - module.bias
        weight = reader.weight(self.network).flatten(1)
        expected, given = x_SCK[:CHECKED].flatten(1) @ weight.T, y_SO[:CHECKED]
        if bool((expected - given).abs().max() > TOLERANCE * given.abs().max()):
            raise UserError(f"{reader.path} is more than a plain layer: this method can't refit it")
        self.read[reader] = x_SCK, y_SO
        self.shapes[reader] = y.shape
        if reader.addition is None:
            self.met[reader] = None

    def _meet(self, reader: Reader, value: Tensor) -> None:
        self.met[reader] = None
        if value.shape == self.shapes[reader]:  # else it is spread, which no weight can mend
            value = value if reader.layer.is_conv else value.movedim(-1, 1)
            self.met[reader] = _rows(value, self.positions[reader])


class _AllSeen(Exception):
    """There is nothing left to look at."""


def _rows(value: Tensor, at_BP: Tensor) -> Tensor:
    """Channels, which lie along dimension 1, at some positions of each image."""
    value = value.flatten(2) if value.dim() > 2 else value[..., None]
    rows = value.gather(2, at_BP[:, None].expand(-1, value.shape[1], -1))
    return rows.movedim(2, 1).flatten(0, 1)


def _patches(conv: nn.Conv2d, x_BCHW: Tensor, at_BP: Tensor, columns: int) -> Tensor:
    """What a convolution reads at some positions: one by one, as all would be k * k images."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x_BCHW, conv._reversed_padding_repeated_twice, mode=mode)
    down, across = (
        torch.arange(k, device=x.device) * d
        for k, d in zip(conv.kernel_size, conv.dilation, strict=True)
    )
    top, left = at_BP // columns * conv.stride[0], at_BP % columns * conv.stride[1]
    rows = top[..., None, None] + down[:, None]
    cols = left[..., None, None] + across
    image = torch.arange(len(x), device=x.device)[:, None, None, None]
    patches = x.movedim(1, 3)[image, rows, cols]  # (B, P, k, k, C)
    return patches.flatten(2, 3).movedim(3, 2).flatten(0, 1)
