"""Passes through a network: what its code asks for besides its modules, gates above all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DROPOUTS = {
    "dropout": F.dropout,
    "dropout2d": F.dropout2d,
    "featuredropout": F.dropout2d,
    "alphadropout": F.alpha_dropout,
    "featurealphadropout": F.feature_alpha_dropout,
}

Decide = Callable[[int, Tensor, int], Tensor]
"""From the number of a gated group, what its maker reads, and where channels lie, to its gates."""


@dataclass(frozen=True)
class Site:
    """Where gates multiply the input of a layer.

    Each piece is a whole gate by its number, or so many channels without one. Where the input is
    not made of such pieces, `index` says for each channel which of all gates it has; the number of
    all gates stands for none.
    """

    dim: int  # of the channels
    pieces: tuple[int | None, ...] = ()
    lengths: tuple[int, ...] = ()
    index: tuple["Progression", ...] = ()


class Progression(NamedTuple):
    """Numbers by a rule: of nested loops, the outermost first, each so many steps of one size."""

    start: int
    loops: tuple[tuple[int, int], ...] = ()  # how many steps, and their size

    def on(self, device: torch.device) -> Tensor:
        """The numbers on a device, made there: a CUDA graph could not bring them to its GPU."""
        numbers = torch.full((), self.start, device=device)
        for steps, size in self.loops:
            numbers = numbers[..., None] + size * torch.arange(steps, device=device)
        return numbers.flatten()


def progressions(numbers: Sequence[int]) -> tuple[Progression, ...]:
    """Numbers in few rules, such as of channels that are repeated, reversed or shuffled."""
    found, before = [Progression(number) for number in numbers], 0
    while len(found) != before:
        before = len(found)
        found = _in_loops(found)
    return tuple(found)


def _in_loops(parts: Sequence[Progression]) -> list[Progression]:
    """Neighbours that differ in their start alone, always by as much, as one more loop of each."""
    found: list[Progression] = []
    at = 0
    while at < len(parts):
        start, loops = parts[at]
        end, size = at + 1, 0
        while end < len(parts) and parts[end].loops == loops:
            step = parts[end].start - parts[end - 1].start
            if end > at + 1 and step != size:
                break
            end, size = end + 1, step
        steps = end - at
        found.append(Progression(start, ((steps, size), *loops)) if steps > 1 else parts[at])
        at = end
    return found


class Run:
    """One pass through a network: what its code asks for besides its modules."""

    def __init__(
        self, sites: Sequence[Site | None], gates: Sequence[Tensor] | None, training: bool
    ) -> None:
        self.sites = sites
        self.gates = gates
        self.training = training

    def gate(self, number: int, x: Tensor) -> Tensor:
        """The input of a layer, multiplied by its gates."""
        if self.gates is None:
            return x
        return multiply(self.sites[number], self.gates, x)

    def dropout(self, name: str, x: Tensor, rate: float) -> Tensor:
        """Dropout in the mode of the network, not in that in which it was captured."""
        return DROPOUTS[name](x, rate, self.training)


class FeatureRun(Run):
    """One pass whose gates are made on the way, from what layers read.

    Args:
        sites: where gates stand.
        training: the network's mode.
        makes: by the number of a layer, the gated groups whose first maker it is.
        widths: gates of each gated group.
        decide: makes the gates of a group.
    """

    def __init__(
        self,
        sites: Sequence[Site | None],
        training: bool,
        makes: Mapping[int, Sequence[int]],
        widths: Sequence[int],
        decide: Decide,
    ) -> None:
        super().__init__(sites, None, training)
        self.makes = makes
        self.widths = widths
        self.decide = decide
        self.made: dict[int, Tensor] = {}

    def gate(self, number: int, x: Tensor) -> Tensor:
        """The input of a layer, multiplied by its gates: makers run before readers."""
        site = self.sites[number]
        assert site is not None
        return multiply(site, self.all_gates(x) if site.index else self.made, x)

    def look(self, number: int, x: Tensor, dim: int) -> None:
        """Makes the gates of what a layer is about to make, from what it reads."""
        for gate in self.makes[number]:
            self.made[gate] = self.decide(gate, x, dim)

    def all_gates(self, x: Tensor) -> tuple[Tensor, ...]:
        """The gates of all groups, ones where they are not made yet."""
        widths = enumerate(self.widths)
        return tuple(self.made[g] if g in self.made else x.new_ones(len(x), w) for g, w in widths)


def gates_at(site: Site, gates: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
    """The gate of each channel that a layer reads."""
    if site.index:
        assert not isinstance(gates, Mapping)
        images = gates[0]
        all_BC = torch.cat([*gates, images.new_ones(len(images), 1)], dim=1)
        return all_BC.index_select(1, torch.cat([part.on(all_BC.device) for part in site.index]))
    images = gates[min(piece for piece in site.pieces if piece is not None)]
    parts = [
        images.new_ones(len(images), length) if piece is None else gates[piece]
        for piece, length in zip(site.pieces, site.lengths, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def multiply(
    site: Site | None, gates: Sequence[Tensor] | Mapping[int, Tensor], x: Tensor
) -> Tensor:
    """What a layer reads, times its gates."""
    assert site is not None
    return times(x, gates_at(site, gates), site.dim)


def times(x: Tensor, g_BC: Tensor, dim: int) -> Tensor:
    """Multiplies the channels of each image, which lie along this dimension."""
    g_BC = g_BC.to(x.dtype)
    between = [1] * (x.dim() - 2)
    shape = (*g_BC.shape, *between) if dim == 1 else (len(g_BC), *between, g_BC.shape[1])
    return x * g_BC.view(shape)
