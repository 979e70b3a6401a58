"""Passes through a network: what its code asks for besides its modules, gates above all."""

import itertools
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
    not made of such pieces, `runs` are taken from all gates side by side, behind which there is a
    one for channels without a gate.
    """

    dim: int  # of the channels
    pieces: tuple[int | None, ...] = ()
    lengths: tuple[int, ...] = ()
    runs: tuple["RunOfGates", ...] = ()


class RunOfGates(NamedTuple):
    """Gates that stand side by side, each for as many channels, as after features are flattened."""

    start: int
    width: int
    repeats: int

    def of(self, all_BC: Tensor) -> Tensor:
        """These of all gates. They are no index, which a CUDA graph could not bring to its GPU."""
        some_BC = all_BC[:, self.start : self.start + self.width]
        return some_BC[:, :, None].expand(-1, -1, self.repeats).flatten(1)


def runs_of_gates(numbers: Sequence[int]) -> tuple[RunOfGates, ...]:
    """Numbers of gates, one for each channel, in as few runs as can be."""
    found: list[RunOfGates] = []
    for number, same in itertools.groupby(numbers):
        repeats, last = len(list(same)), found[-1] if found else None
        if last is not None and (last.start + last.width, last.repeats) == (number, repeats):
            found[-1] = last._replace(width=last.width + 1)
        else:
            found.append(RunOfGates(number, 1, repeats))
    return tuple(found)


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
        return multiply(site, self.all_gates(x) if site.runs else self.made, x)

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
    if site.runs:
        assert not isinstance(gates, Mapping)
        images = gates[0]
        all_BC = torch.cat([*gates, images.new_ones(len(images), 1)], dim=1)
        return torch.cat([run.of(all_BC) for run in site.runs], dim=1)
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
