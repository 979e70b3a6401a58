"""A compute budget that holds: gates are steered to a share of the dense network's MACs.

Mixture weights sum to one, so subtracting a number from all weights of a gate lowers its score by
exactly that number, for every image: g = ReLU((W - t) e) = ReLU(W e - t). A threshold per layer can
thus be moved without leaving the model family. After every training step the budget looks for the
threshold, in units of each layer's scale, at which the batch would cost what the goal asks for (the
goal itself sinks slowly to the target), and moves part of the way: a short run has to go all of it
at once, a long one can take its time. The effect of a threshold is immediate, so nothing winds up;
thresholds sink again when too little runs, so that closed gates come back; a layer at its floor is
only ever opened. Each layer's open gates are held at one on average: what a threshold takes from
them would otherwise make them fade, until the epsilon of the next batch norm outweighs them.
"""

import torch
from torch import Tensor

from deepmoe.costs import Size, cost_matrix, count_costs, dense_macs, least, macs_of_counts
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches, batches_for
from deepmoe.graph import channel_strengths, scale_inputs
from deepmoe.layers import GateHeads, Gates
from deepmoe.model import DeepMoE
from deepmoe.processes import process_count, sum_over_processes

STEPS_TO_TARGET = 20  # in which thresholds could go all the way, if a run has no more
SLOWEST = 0.01  # part of the way that is gone in a step of a long run
CANDIDATES = 16  # thresholds that are tried at once
TRIED_IMAGES = 16  # of a batch: enough to tell what a threshold would do
CALIBRATION_IMAGES = 4096
SPREAD = 0.5  # by which gates that start alike are parted
FURTHEST = 4.0  # that calibration moves thresholds, in units of each layer's scale


class MacsBudget:
    """Steers the gate heads of a model to a target cost.

    Gates that start all alike, as `gate` makes them, could only close all at once. They are handed
    out first: the largest to the channels that the network's weights make most of. Weights are
    scaled in turn, so that the network still computes the same.

    Args:
        model: a gated model with ReLU heads.
        size: of its input images.
        target: share of the dense base network's MACs up to 1, or a number of MACs above.
        steps: number of training steps to be steered.
        ramp: parts of these steps (0 to 1) between which the goal falls to the target.
        floor: share of each layer's channels that are left running.

    Raises:
        UserError: where the target can't be met.
    """

    def __init__(
        self,
        model: DeepMoE,
        size: Size,
        target: float,
        *,
        steps: int,
        ramp: tuple[float, float] = (0.1, 0.6),
        floor: float = 0.05,
    ) -> None:
        if not isinstance(model, DeepMoE) or not isinstance(model.heads, GateHeads):
            raise UserError("a compute budget needs a gated model with relu heads")
        if not isinstance(target, int | float) or not isinstance(steps, int):
            raise UserError("target is a number, and steps a whole one")
        if model.thresholds is not None:
            raise UserError("a compute budget can't steer a model with thresholds of its own")
        if _all_alike(model.heads):
            _hand_out(model, model.heads)
        costs, device = count_costs(model, size), model.heads.weight.device
        self.heads = model.heads
        self.dense = float(dense_macs(model, size))
        self.routing = float(costs.embedding_macs + costs.gate_macs)
        self.target = target if target <= 1 else target / self.dense
        self.ramp = ramp
        self.floor = floor
        self.rate = min(max(STEPS_TO_TARGET / max(1, steps), SLOWEST), 1.0)
        self.widths = torch.tensor(model.gating.widths, dtype=torch.float64, device=device)
        self.layer_of = torch.arange(len(self.widths), device=device).repeat_interleave(
            self.widths.long()
        )
        self.quadratic = cost_matrix(model.gating, size).to(device)
        fewest = self._share((self.widths * floor)[None]).item()
        most = (costs.macs + self.routing) / self.dense
        if not fewest <= self.target <= most:
            raise UserError(
                f"a target of {target:g} can't be met: with embedding and gates, this "
                f"model costs from {fewest:.3f} to {most:.3f} of the dense one, of which they "
                f"take {self.routing / self.dense:.3f} (smaller embedding.widths take less)"
            )

    def goal(self, progress: float) -> float:
        """The share to run at this part of the steps (0 to 1)."""
        start, end = self.ramp
        if progress >= end:
            return self.target
        done = max(progress - start, 0.0) / (end - start)
        return 1.0 + done * (self.target - 1.0)

    @torch.no_grad()
    def step(self, gates: Gates, progress: float) -> None:
        """Moves the thresholds after a training step, by the gates of its batch.

        Args:
            gates: of the batch, or of this process's part of it.
            progress: of the steps, 0 to 1, this one included.
        """
        g_BC, scales = torch.cat(gates, dim=1), self._scales()
        shifts = self._candidates(scales)
        counts_BL, totals_BL = self._by_layer(g_BC > 0), self._by_layer(g_BC)
        parts = [self._shares_at(shifts, g_BC, scales), counts_BL.mean(0), totals_BL.mean(0)]
        means = sum_over_processes(torch.cat(parts)) / process_count()
        shares, counts, totals = means.split([len(part) for part in parts])
        shift = _where_it_costs(self.goal(progress), shifts, shares)
        # A layer that nearly died is opened with full strength: its gradients are gone.
        lack = 1 - counts / (self.widths * self.floor)
        push = torch.where(lack >= 0, torch.minimum(shift, -lack - 0.01), shift)
        self._raise_thresholds(self.rate * push * scales)
        # Thresholds wear gates down, and a batch norm behind them hides that from the task.
        mean_open = torch.where(counts > 0, totals / counts.clamp_min(1e-3), 1.0)
        self._scale_open(mean_open.clamp(1e-3, 1e3) ** -self.rate)

    @torch.no_grad()
    def calibrate(self, model: DeepMoE, batches: Batches) -> None:
        """Meets the target on given images, in evaluation mode.

        What is too much goes with the weakest gates, which are closed for good: a threshold would
        change all others too. Only where the floor leaves no more to close, and where too little
        runs, thresholds move, all alike.
        """
        scores_BC = self._collect_scores(model, batches)
        too_much = self._share_of(scores_BC) > self.target
        if too_much:
            scores_BC = self._close_weakest(scores_BC)
        if not too_much or self._share_of(scores_BC) > self.target:
            self._move_thresholds(scores_BC)

    def _candidates(self, scales_L: Tensor) -> Tensor:
        """By how much all thresholds might be raised, in units of scale: up to the largest gate."""
        largest = self.heads.weight.amax(dim=1).double() / scales_L[self.layer_of]
        steps = torch.linspace(0, 1, CANDIDATES, dtype=torch.float64, device=largest.device)
        return steps * largest.max().clamp(0, FURTHEST)

    def _shares_at(self, shifts_T: Tensor, g_BC: Tensor, scales_L: Tensor) -> Tensor:
        """What a batch would cost with each of these thresholds, all tried in one go."""
        # The same images, however many processes share the batch.
        every = max(1, len(g_BC) * process_count() // TRIED_IMAGES)
        ratios_BC = g_BC[::every].double() / scales_L[self.layer_of]
        open_TBC = ratios_BC > shifts_T[:, None, None]
        shares = self._share(self._by_layer(open_TBC.flatten(0, 1)))
        return shares.view(len(shifts_T), -1).mean(dim=1)

    def _close_weakest(self, scores_BC: Tensor) -> Tensor:
        """Closes as few gates as meet the target, weakest first; the scores that are left."""
        strengths_C = scores_BC.relu().mean(dim=0).double()
        layer_means_L = self._by_layer(strengths_C[None])[0] / self.widths
        order = (strengths_C / layer_means_L[self.layer_of].clamp_min(1e-12)).argsort()
        order = order[self._may_close(order, (scores_BC > 0).double().mean(dim=0))]

        def without(count: float) -> Tensor:
            return scores_BC.index_fill(1, order[: int(count)], 0.0)

        def enough(count: float) -> bool:
            return self._share_of(without(count)) <= self.target

        fewest = least(enough, 0, len(order))
        self.heads.close(order[: int(fewest)])
        return without(fewest)

    def _may_close(self, order: Tensor, active_C: Tensor) -> Tensor:
        """Which channels, weakest first, leave each layer its floor when they are closed."""
        layers, allowed = self.layer_of[order], torch.zeros_like(order, dtype=torch.bool)
        for layer, width in enumerate(self.widths.tolist()):
            places = (layers == layer).nonzero().flatten()
            running = active_C[order[places]]
            allowed[places] = running.sum() - running.cumsum(0) >= self.floor * width
        return allowed

    def _move_thresholds(self, scores_BC: Tensor) -> None:
        """Meets the target by one threshold, in units of each layer's scale, down to the floor."""
        highest, scales = self._highest_thresholds(scores_BC), self._scales()

        def enough(shift: float) -> bool:
            shifts_L = torch.minimum(shift * scales, highest)
            return self._share_of(scores_BC - shifts_L[self.layer_of]) <= self.target

        shift = least(enough, -FURTHEST, FURTHEST)
        self._raise_thresholds(torch.minimum(shift * scales, highest))

    def _highest_thresholds(self, scores_BC: Tensor) -> Tensor:
        """For each layer, the threshold that leaves just its floor running."""
        highest = []
        for layer, width in enumerate(self.widths.long().tolist()):
            of_layer = scores_BC[:, self.layer_of == layer].flatten().sort(descending=True).values
            kept = min(len(of_layer) - 1, int(self.floor * width * len(scores_BC)))
            highest.append(of_layer[kept].double())
        return torch.stack(highest)

    def _share_of(self, scores_BC: Tensor) -> float:
        return self._share(self._by_layer(scores_BC > 0)).mean().item()

    def _by_layer(self, values_BC: Tensor) -> Tensor:
        """Sums over the channels of each layer."""
        sums = values_BC.new_zeros(len(values_BC), len(self.widths), dtype=torch.float64)
        return sums.index_add_(1, self.layer_of, values_BC.double())

    def _share(self, active_BL: Tensor) -> Tensor:
        return (macs_of_counts(active_BL, self.quadratic) + self.routing) / self.dense

    def _scales(self) -> Tensor:
        """The usual size of each layer's weights: what a threshold is measured by."""
        sizes_C = self.heads.weight.abs().mean(dim=1)
        return (self._by_layer(sizes_C[None])[0] / self.widths).clamp_min(1e-6)

    def _raise_thresholds(self, shifts_L: Tensor) -> None:
        self.heads.weight.sub_(shifts_L.to(self.heads.weight.dtype)[self.layer_of][:, None])

    def _scale_open(self, factors_L: Tensor) -> None:
        """Scales gates that some image may open. Others would sink ever deeper, beyond return."""
        weight = self.heads.weight
        factors = factors_L.to(weight.dtype)[self.layer_of][:, None]
        weight.mul_(torch.where(weight.amax(dim=1, keepdim=True) > 0, factors, 1.0))

    def _collect_scores(self, model: DeepMoE, batches: Batches) -> Tensor:
        assert model.embedding is not None
        found = []
        for x_BCHW, _ in batches_for(model, batches, CALIBRATION_IMAGES, "meeting the budget"):
            e_BD, _ = model.embedding(x_BCHW)
            found.append(e_BD.to(self.heads.weight.dtype) @ self.heads.weight.T)
        return torch.cat(found)


def _where_it_costs(goal: float, shifts_T: Tensor, shares_T: Tensor) -> Tensor:
    """By how much to raise all thresholds so that a batch costs the goal; below 0: to lower.

    Nothing here waits for the device.
    """
    # Between the last candidate that costs too much and the first that does not.
    at = (shares_T > goal).sum().clamp(1, len(shifts_T) - 1)
    before, after = shares_T[at - 1], shares_T[at]
    part = ((before - goal) / (before - after).clamp_min(1e-9)).clamp(0, 1)
    found = torch.lerp(shifts_T[at - 1], shifts_T[at], part)
    # How far to go down can't be seen from gates that are closed: in proportion to the lack.
    return torch.where(shares_T[0] > goal, found, shares_T[0] - goal)


def _all_alike(heads: GateHeads) -> bool:
    """Whether all gates of each layer are the same, and open, for every image."""
    return all(
        bool((w == w[0, 0]).all()) and bool(w[0, 0] > 0)
        for w in heads.weight.detach().split(heads.widths)
    )


@torch.no_grad()
def _hand_out(model: DeepMoE, heads: GateHeads) -> None:
    """Parts gates that are all alike, by the strengths of their channels."""
    before = heads.weight[:, 0].clone()
    for weight in heads.weight.split(heads.widths):
        parted = torch.linspace(1 + SPREAD, 1 - SPREAD, len(weight), device=weight.device)
        weight.mul_(parted[:, None].to(weight))
    heads.order_by_strength(channel_strengths(model.network, model.gating))
    scale_inputs(model.network, model.gating, before / heads.weight[:, 0])
