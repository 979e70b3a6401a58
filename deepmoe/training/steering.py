"""What heads that look at features are given from step to step, all of it resumable.

How many channels run, and how much an agent explores, are pure functions of how far training is.
An agent's price is moved between epochs, and kept with its weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepmoe.costs import (
    Size,
    cost_matrix,
    count_costs,
    count_macs,
    dense_macs,
    largest,
    macs_of_counts,
)
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches, batches_for, size_of
from deepmoe.layers import FeatureBoosting, PruningAgent
from deepmoe.model import DeepMoE

LEAST_EPSILON = 0.1  # of exploration, at the end
CALIBRATION_IMAGES = 500
TRIED_SHIFTS = 20
FURTHEST = 4.0  # to which an agent's decisions are shifted towards more channels
DOUBLINGS = 12  # of the shift towards fewer
TOLERANCE = 0.005  # share of the goal that a mean cost may lie below it
FASTEST = 4.0  # factor by which a penalty may change at once
PENALTIES = (1e-4, 1e2)  # between which it stays


class ShareSchedule:
    """Lowers the share of channels that `FeatureBoosting` keeps, from all of them on.

    Args:
        model: with such heads.
        size: of its input images.
        target: share of the dense base network's MACs up to 1, or a number of MACs above: the heads
            then keep as large a share as costs no more. `None`: the share that they were made with.
        ramp: parts of the joint stage (0 to 1) between which the share falls.

    Raises:
        UserError: where the target can't be met.
    """

    def __init__(
        self, model: DeepMoE, size: Size, target: float | None, ramp: tuple[float, float]
    ) -> None:
        assert isinstance(model.heads, FeatureBoosting)
        self.heads = model.heads
        self.ramp = ramp
        self.share = self.heads.share if target is None else share_for(model, size, target)
        self.kept: list[int] | None = None

    def before(self, progress: float) -> None:
        """Sets the heads for a step at this part of the joint stage (0 to 1)."""
        share = falling(1.0, self.share, progress, self.ramp)
        kept = self.heads.counts(share)
        if kept != self.kept:  # most steps change nothing
            self.heads.keep(share)
            self.kept = kept

    def settle(self, model: DeepMoE, batches: Batches, progress: float, learns: bool) -> None:
        """What an epoch ends with."""
        if progress >= 1:
            self.before(1.0)

    @property
    def settled(self) -> list[Tensor]:
        """What `settle` may have changed."""
        return [self.heads.kept_L]


def share_for(model: DeepMoE, size: Size, target: float) -> float:
    """The largest share of every layer's channels that costs no more than a target.

    Every image costs the same, so that this is a matter of counting; the heads are counted in.
    """
    heads = model.heads
    assert isinstance(heads, FeatureBoosting)
    dense, quadratic = dense_macs(model, size), cost_matrix(model.gating, size)
    most = target * dense if target <= 1 else target

    def cost(share: float) -> float:
        counts = torch.tensor([heads.counts(share)], dtype=torch.float64)
        return macs_of_counts(counts, quadratic).item() + heads.macs

    _check_least(cost(0.0), most, dense, target)
    return largest(lambda share: cost(share) <= most, 0.0, 1.0)


class AgentSteering:
    """Lets a `PruningAgent` explore less and less, and moves its price to a target cost.

    After an epoch, a shift of its decisions is found at which images cost what the goal asks for;
    the goal itself falls to the target. The shift is a price that its values do not know of yet:
    where the agent learns, that is added to the penalty, so that the next shift is smaller.

    Args:
        model: with such heads.
        size: of its input images.
        target: share of the dense base network's MACs up to 1, or a number of MACs above. `None`:
            the penalty stays as it is.
        ramp: parts of the joint stage (0 to 1) between which the goal falls.

    Raises:
        UserError: where the target can't be met.
    """

    def __init__(
        self, model: DeepMoE, size: Size, target: float | None, ramp: tuple[float, float]
    ) -> None:
        assert isinstance(model.heads, PruningAgent)
        self.heads = heads = model.heads
        self.ramp = ramp
        self.dense = dense_macs(model, size)
        costs = count_costs(model, size)
        self.most = (costs.macs + costs.gate_macs) / self.dense
        self.target: float | None = None
        if target is not None:
            fewest = torch.tensor([[-(-width // heads.groups) for width in heads.widths]])
            network = macs_of_counts(fewest.double(), cost_matrix(model.gating, size)).item()
            allowed = target * self.dense if target <= 1 else target
            _check_least(network + costs.gate_macs, allowed, self.dense, target)
            self.target = allowed / self.dense

    @torch.no_grad()
    def before(self, progress: float) -> None:
        """Sets the heads for a step at this part of the joint stage (0 to 1)."""
        self.heads.epsilon.fill_(falling(1.0, LEAST_EPSILON, progress, (0.0, 1.0)))

    @torch.no_grad()
    def settle(self, model: DeepMoE, batches: Batches, progress: float, learns: bool) -> None:
        """What an epoch ends with.

        Args:
            model: to steer.
            batches: images to measure costs on.
            progress: of the joint stage, from 0 to 1.
            learns: whether it was the agent that has learnt in this epoch.
        """
        if self.target is None:
            return
        goal = falling(self.most, min(self.target, self.most), progress, self.ramp)
        shift = self._shift_for(goal, lambda shift: self._cost(model, batches, shift))
        self.heads.shift.fill_(shift)
        if learns:
            old = -self.heads.penalty.item()
            new = min(max(old + shift, old / FASTEST), old * FASTEST)
            self.heads.penalty.fill_(-min(max(new, PENALTIES[0]), PENALTIES[1]))

    @property
    def settled(self) -> list[Tensor]:
        """What `settle` may have changed."""
        return [self.heads.shift, self.heads.penalty]

    def _cost(self, model: DeepMoE, batches: Batches, shift: float) -> float:
        """The mean cost of images under a shift, as a share of the dense one."""
        self.heads.shift.fill_(shift)
        total = images = 0.0
        for x_BCHW, _ in batches_for(model, batches, CALIBRATION_IMAGES, "meeting the budget"):
            macs = count_macs(model, size_of(x_BCHW), model(x_BCHW).gates)
            total, images = total + float(macs.double().sum()), images + len(x_BCHW)
        return total / images / self.dense

    def _shift_for(self, goal: float, cost: Callable[[float], float]) -> float:
        """A shift that costs the goal at most, and hardly less if there is one."""
        low, high = -FURTHEST, FURTHEST
        if cost(low) <= goal:
            return low
        for _ in range(DOUBLINGS):
            if cost(high) <= goal:
                break
            low, high = high, 2 * high
        for _ in range(TRIED_SHIFTS):
            middle = (low + high) / 2
            found = cost(middle)
            low, high = (low, middle) if found <= goal else (middle, high)
            if goal * (1 - TOLERANCE) <= found <= goal:
                break
        return high


Steering = ShareSchedule | AgentSteering


def steering_for(
    model: DeepMoE, size: Size, target: float | None, ramp: tuple[float, float]
) -> Steering | None:
    """What steers a model's heads; `None` for those that do not look at features."""
    kinds: dict[type, Any] = {FeatureBoosting: ShareSchedule, PruningAgent: AgentSteering}
    made = kinds.get(type(model.heads))
    return None if made is None else made(model, size, target, ramp)


def falling(start: float, end: float, progress: float, ramp: tuple[float, float]) -> float:
    """What falls along a ramp, at this part of the way (0 to 1)."""
    first, last = ramp
    if progress >= last:
        return end
    return start + max(progress - first, 0.0) / (last - first) * (end - start)


def _check_least(least: float, allowed: float, dense: float, target: float) -> None:
    if least > allowed:
        raise UserError(
            f"a target of {target:g} can't be met: with its gates, this model costs at least "
            f"{least / dense:.3f} of the dense one"
        )
