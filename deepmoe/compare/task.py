"""What every static method is asked, and what it answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from deepmoe.compare.widths import Widths, even_widths, strongest, widths_by_threshold
from deepmoe.costs import Size
from deepmoe.data import Batch
from deepmoe.errors import UserError
from deepmoe.graph import Gating, Group, have_norms, norm_scales
from deepmoe.model import DeepMoE


@runtime_checkable
class Epochs(Protocol):
    """Labelled training images; a `Loader` is one."""

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of a training epoch."""


@dataclass(frozen=True)
class PruningTask:
    """A trained network that is to lose channels, and what a method may look at.

    Attributes:
        model: without gates; a method leaves it as it is.
        gating: covers all groups that can lose channels.
        size: of input images.
        share: of the network's MACs that is to be left.
        loader: of labelled training images.
        widths: channels that are to be left of each group, where they are given.
        tilt: as in `widths_for`.
        factors: of each group's channels, where the network was trained with scaling factors.
        seed: of what a method draws.
    """

    model: DeepMoE
    gating: Gating
    size: Size
    share: float
    loader: Epochs
    widths: Widths | None = None
    tilt: float = 0.0
    factors: tuple[Tensor, ...] | None = None
    seed: int = 0

    @property
    def groups(self) -> list[Group]:
        """The groups that the gating covers, in its order."""
        return [self.gating.graph.groups[number] for number in self.gating.gated]

    @property
    def fixed(self) -> list[bool]:
        """For each group, whether it keeps all channels: published methods leave streams alone."""
        fixed = [group.is_stream for group in self.groups]
        if all(fixed):
            raise UserError("this network has only residual streams, which this method can't prune")
        return fixed

    def even_widths(self) -> Widths:
        """What is left if every group, but for residual streams, loses the same share."""
        if self.widths is not None:
            return self.widths
        return even_widths(self.gating, self.size, self.share, self.fixed)

    def widths_by_threshold(self, scores: Sequence[Tensor]) -> Widths:
        """What one threshold for all groups leaves, but for residual streams."""
        if self.widths is not None:
            return self.widths
        judged = [None if fixed else s for s, fixed in zip(scores, self.fixed, strict=True)]
        return widths_by_threshold(self.gating, self.size, self.share, judged)

    def norm_scales(self) -> list[Tensor]:
        """The scales of batch norms, of each group; residual streams may be without."""
        check_norms(self.model.network, self.gating)
        found = norm_scales(self.model.network, self.gating)
        return [
            torch.ones(width) if scales is None else scales
            for scales, width in zip(found, self.gating.widths, strict=True)
        ]


@dataclass(frozen=True)
class Choice:
    """A method's answer: which channels stay, and what the weights are then.

    Attributes:
        masks: for each group of the task's gating, which channels stay.
        network: the whole network with other weights, where the method has changed some; those of
            channels that go do not matter.
        refit_norms: whether batch norms are to be measured anew: other weights may have others.
    """

    masks: tuple[Tensor, ...]
    network: nn.Module | None = None
    refit_norms: bool = False


Select = Callable[[PruningTask], Choice]
"""A static method."""


def check_norms(network: nn.Module, gating: Gating) -> None:
    """Refuses networks with convolutions that no batch norm follows, but for residual streams."""
    for number, normed in zip(gating.gated, have_norms(network, gating), strict=True):
        group = gating.graph.groups[number]
        if not normed and not group.is_stream:
            raise UserError(
                "slimming and sss need batch norm behind every convolution, "
                f"and {group.name} has none"
            )


def keep_strongest(scores: Sequence[Tensor], widths: Sequence[int]) -> Choice:
    """The choice of those channels that score highest in their group."""
    return Choice(strongest(scores, widths))


def unit_sums(task: PruningTask) -> Tensor:
    """Zeros, one for each unit; the last stands for channels that belong to none (unit -1)."""
    return torch.zeros(task.gating.graph.offsets[-1] + 1, dtype=torch.float64)
