"""Gate heads that look at features: a layer's gates come from what the layer itself reads.

Such gates are not known before the network runs. `start` begins a pass through it; what that gives
is asked for the gates of each group in turn, when the layer that makes the group is about to run.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.layers.heads import kept_of, project

FLOOR = 1e-6  # a channel that was chosen runs, and is counted, even where its ReLU gives 0
# Large features make large gates, and these larger features: beyond reason, that loop is cut.
LARGEST = 16.0


class Decisions(NamedTuple):
    """What an agent has decided for a batch, layer after layer.

    Attributes:
        values_BLA: Q-values of the actions.
        actions_BL: the actions taken, from 0.
        penalty: reward of every group that an action runs beyond the first; negative.
    """

    values_BLA: Tensor
    actions_BL: Tensor
    penalty: Tensor


class Pass(ABC):
    """One pass of a batch through a network."""

    @abstractmethod
    def gates(self, number: int, x: Tensor, dim: int) -> Tensor:
        """The gates of a group.

        Args:
            number: of the group, among the gated ones.
            x: what its first maker reads, gated.
            dim: along which the channels lie.
        """

    @property
    def decisions(self) -> Decisions | None:
        """What was decided so far, where there is something to learn from it."""
        return None


class FeatureHeads(nn.Module, ABC):
    """What makes gates of features.

    `kind` is what a configuration calls them.

    Args:
        inputs: channels that the first maker of each gated group reads.
        widths: gates of each gated group of channels.
    """

    kind: str

    def __init__(self, inputs: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        if len(inputs) != len(widths):
            raise ValueError("there must be a number of inputs for each width")
        self.inputs = list(inputs)
        self.widths = list(widths)

    @abstractmethod
    def start(self) -> Pass:
        """Begins a pass."""

    @property
    @abstractmethod
    def macs(self) -> int:
        """MACs of an image's gates."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a configuration says of such heads."""


class FeatureBoosting(FeatureHeads):
    """Feature Boosting and Suppression (Gao et al. 2019).

    For each layer, s is the mean of |x| over positions, h = W s + b, and the channels with the
    largest h run: exactly `kept_L` of them for every image, with gates ReLU(h), which is at most
    `LARGEST`. All others are zero. Gates take the place of the scales of batch norm: see
    `absorb_scales`.

    Args:
        inputs: channels that the first maker of each gated group reads.
        widths: gates of each gated group of channels.
        share: of each layer's channels that run; at least one does.
        spread: of the weights at first, in units of He's initialisation.
    """

    kind = "fbs"
    kept_L: Tensor

    def __init__(
        self,
        inputs: Sequence[int],
        widths: Sequence[int],
        *,
        share: float = 0.5,
        spread: float = 0.1,
    ) -> None:
        super().__init__(inputs, widths)
        if not 0 < share <= 1:
            raise UserError(
                f"the share of kept channels must be above 0 and at most 1, not {share}"
            )
        self.share = share
        self.spread = spread
        self.layers = nn.ModuleList(
            nn.Linear(read, made) for read, made in zip(inputs, widths, strict=True)
        )
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, 0.0, spread * math.sqrt(2 / max(1, layer.in_features)))
            nn.init.ones_(layer.bias)
        # A tensor, so that what is compiled or captured follows it.
        self.register_buffer("kept_L", torch.tensor(self.counts(share)))

    def counts(self, share: float) -> list[int]:
        """How many channels of each layer run at a share."""
        return kept_of(share, self.widths)

    @torch.no_grad()
    def keep(self, share: float) -> None:
        """From now on, this share of each layer's channels runs."""
        self.kept_L.copy_(torch.tensor(self.counts(share)))

    @torch.no_grad()
    def start_at(self, gates: Mapping[int, Tensor]) -> None:
        """Starts some layers' gates at given values, instead of 1."""
        for number, values_C in gates.items():
            self.get_parameter(f"layers.{number}.bias").copy_(values_C)

    def start(self) -> "BoostingPass":
        return BoostingPass(self)

    def of_layer(self, number: int, s_BC: Tensor) -> Tensor:
        """The gates of a layer, from the means of what it reads."""
        layer = self.layers[number]
        h_BC = project(s_BC, layer.weight) + layer.bias  # type: ignore[arg-type, operator]
        # Ranks, not a threshold: of channels that tie, no more run than there is room for.
        ranks_BC = h_BC.detach().argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return torch.where(ranks_BC < self.kept_L[number], h_BC.clamp(FLOOR, LARGEST), 0.0)

    @property
    def macs(self) -> int:
        return sum(read * made for read, made in zip(self.inputs, self.widths, strict=True))

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "share": self.share, "spread": self.spread}


class BoostingPass(Pass):
    """A pass under `FeatureBoosting`: no layer depends on another."""

    def __init__(self, heads: FeatureBoosting) -> None:
        self.heads = heads

    def gates(self, number: int, x: Tensor, dim: int) -> Tensor:
        return self.heads.of_layer(number, pooled(x.abs(), dim))


def pooled(x: Tensor, dim: int) -> Tensor:
    """The mean of each channel over its positions, in at least single precision."""
    x = x if x.dtype == torch.float64 else x.float()
    positions = range(2, x.dim()) if dim == 1 else range(1, x.dim() - 1)
    return x.mean(dim=tuple(positions)) if positions else x
