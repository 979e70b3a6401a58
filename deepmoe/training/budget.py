"""A compute budget that holds: gates are steered to a share of the dense network's MACs.

Mixture weights sum to one, so subtracting a number from all weights of a gate lowers its score by
exactly that number, for every image: g = ReLU((W - t) e) = ReLU(W e - t). A threshold per layer can
thus be moved without leaving the model family. The budget moves the thresholds after every
training step, in proportion to how far the batch's MACs are from the goal (the goal itself sinks
slowly to the target). The effect of a threshold is immediate, so nothing winds up; the same law
lowers thresholds again when too little runs, so closed gates come back; a layer at its floor is
only ever opened. Each layer's open gates are held at one on average: what a threshold takes from
them would otherwise make them fade, until the epsilon of the next batch norm outweighs them.
"""

from collections.abc import Iterable

import torch
from lightning_fabric import Fabric
from torch import Tensor

from deepmoe.config import TrainConfig
from deepmoe.costs import Size, cost_matrix, count_costs, macs_of_counts, marginal_macs
from deepmoe.data import Batch
from deepmoe.errors import UserError
from deepmoe.layers import GateHeads, Gates
from deepmoe.model import DeepMoE, evaluation_mode

TRAVEL = 20.0  # how far thresholds may move in a stage, in units of scale times full error
GAIN_RANGE = (0.01, 0.1)
CALIBRATION_IMAGES = 4096
BISECTIONS = 30


class MacsBudget:
    """Steers the gate heads of a model to a target cost.

    Args:
        model: a gated model with ReLU heads.
        size: of its input images.
        train: target, floor and weighting.
        steps: number of training steps of the joint stage.

    Raises:
        UserError: where the target can't be met.
    """

    def __init__(self, model: DeepMoE, size: Size, train: TrainConfig, steps: int) -> None:
        if not isinstance(model.heads, GateHeads) or train.target_macs is None:
            raise UserError("train.target_macs needs a gated model with relu heads")
        if model.thresholds is not None:
            raise UserError("train.target_macs can't steer a model that deepmoe cut has made")
        costs = count_costs(model, size)
        device = model.heads.weight.device
        self.heads = model.heads
        self.dense = float(costs.macs)
        self.routing = float(costs.embedding_macs + costs.gate_macs)
        target = train.target_macs
        self.target = target if target <= 1 else target / self.dense
        self.widths = torch.tensor(model.backbone.gate_widths, dtype=torch.float64, device=device)
        self.layer_of = torch.repeat_interleave(
            torch.arange(len(self.widths), device=device), self.widths.long()
        )
        self.layer_of_row = torch.repeat_interleave(
            torch.arange(len(self.widths), device=device),
            torch.tensor(model.heads.rows, device=device),
        )
        numbers = torch.arange(len(model.heads.weight), device=device)
        self.row_of = model.heads.per_channel(numbers, dim=0)  # of each channel
        self.quadratic = cost_matrix(model.backbone, size).to(device)
        self.ramp = train.budget_ramp
        self.floor = train.channel_floor
        self.gain = min(max(TRAVEL / max(1, steps), GAIN_RANGE[0]), GAIN_RANGE[1])
        self.pressure = self._pressure(train.budget_by_cost)
        least = self._share((self.widths * self.floor)[None])
        most = 1 + self.routing / self.dense
        if not float(least) <= self.target <= most:
            raise UserError(
                f"train.target_macs = {target:g} can't be met: with embedding and gates, this "
                f"model costs from {float(least):.3f} to {most:.3f} of the dense one"
            )

    def goal(self, progress: float) -> float:
        """The share to run at this part of the joint stage (0 to 1)."""
        start, end = self.ramp
        if progress >= end:
            return self.target
        done = max(progress - start, 0.0) / (end - start)
        return 1.0 + done * (self.target - 1.0)

    @torch.no_grad()
    def step(self, gates: Gates, progress: float, fabric: Fabric | None = None) -> None:
        """Moves the thresholds after a training step, by the gates of its batch.

        Args:
            gates: of the batch, or of this process's part of it.
            progress: of the joint stage, 0 to 1.
            fabric: where several processes share a batch.
        """
        g_BC = torch.cat(gates, dim=1)
        active_BL = self._by_layer(g_BC > 0)
        means = torch.cat(
            [self._share(active_BL)[:, None], active_BL, self._by_layer(g_BC)], dim=1
        ).mean(dim=0)
        if fabric is not None and fabric.world_size > 1:
            means = torch.as_tensor(fabric.all_reduce(means, reduce_op="mean"))
        share, active, total = means.split([1, len(self.widths), len(self.widths)])
        push = (share - self.goal(progress)) * self.pressure
        # A layer that nearly died is opened with full strength: its gradients are gone.
        lack = 1 - active / (self.widths * self.floor)
        push = torch.where(lack >= 0, torch.minimum(push, -lack - 0.01), push)
        self._raise_thresholds(self.gain * push * self._scales())
        # Thresholds wear gates down, and a batch norm behind them hides that from the task.
        mean_open = torch.where(active > 0, total / active.clamp_min(1e-3), 1.0)
        self._scale_open(mean_open.clamp(1e-3, 1e3) ** -self.gain)

    @torch.no_grad()
    def calibrate(self, model: DeepMoE, batches: Iterable[Batch]) -> None:
        """Meets the target on given images, in evaluation mode.

        What is too much goes with the weakest gates, which are closed for good: a threshold would
        change all others too. Only where the floor leaves no more to close, and where too little
        runs, thresholds move, all alike.
        """
        scores_BC = self._collect_scores(model, batches)
        too_much = float(self._share_of(scores_BC)) > self.target
        if too_much:
            scores_BC = self._close_weakest(scores_BC)
        if not too_much or float(self._share_of(scores_BC)) > self.target:
            self._move_thresholds(scores_BC)

    def _close_weakest(self, scores_BC: Tensor) -> Tensor:
        """Closes as few gates as meet the target, weakest first; the scores that are left."""
        strengths_C = scores_BC.relu().mean(dim=0).double()
        layer_means_L = self._by_layer(strengths_C[None])[0] / self.widths
        # Gates of several channels count for all of them.
        strengths = self._by_row(strengths_C / layer_means_L[self.layer_of].clamp_min(1e-12))
        order = strengths.argsort()
        order = order[self._may_close(order, self._by_row((scores_BC > 0).double().mean(dim=0)))]

        def without(rows: int) -> Tensor:
            closed = torch.zeros(len(strengths), dtype=torch.bool, device=order.device)
            closed[order[:rows]] = True
            return scores_BC.masked_fill(closed[self.row_of], 0.0)

        fewest, most = 0, len(order)
        while fewest < most:
            middle = (fewest + most) // 2
            enough = float(self._share_of(without(middle))) <= self.target
            fewest, most = (fewest, middle) if enough else (middle + 1, most)
        weak = order[:fewest]
        self.heads.weight[weak] -= self.heads.weight[weak].amax(dim=1, keepdim=True).clamp_min(0)
        return without(fewest)

    def _may_close(self, order: Tensor, active: Tensor) -> Tensor:
        """Which rows, weakest first, leave each layer its floor when they are closed."""
        layers, allowed = self.layer_of_row[order], torch.zeros_like(order, dtype=torch.bool)
        for layer, width in enumerate(self.widths.tolist()):
            places = (layers == layer).nonzero().flatten()
            running = active[order[places]]
            allowed[places] = running.sum() - running.cumsum(0) >= self.floor * width
        return allowed

    def _move_thresholds(self, scores_BC: Tensor) -> None:
        """Meets the target by one threshold, in units of each layer's scale, down to the floor."""
        highest = self._highest_thresholds(scores_BC)
        direction = self.pressure * self._scales()
        low, high = -4.0, 4.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            shift = torch.minimum(middle * direction, highest)
            enough = float(self._share_of(scores_BC - shift[self.layer_of])) <= self.target
            low, high = (low, middle) if enough else (middle, high)
        self._raise_thresholds(torch.minimum(high * direction, highest))

    def _highest_thresholds(self, scores_BC: Tensor) -> Tensor:
        """For each layer, the threshold that leaves just its floor running."""
        highest = []
        for layer, width in enumerate(self.widths.long().tolist()):
            of_layer = scores_BC[:, self.layer_of == layer].flatten().sort(descending=True).values
            kept = min(len(of_layer) - 1, int(self.floor * width * len(scores_BC)))
            highest.append(of_layer[kept].double())
        return torch.stack(highest)

    def _share_of(self, scores_BC: Tensor) -> Tensor:
        return self._share(self._by_layer(scores_BC > 0)).mean()

    def _by_layer(self, values_BC: Tensor) -> Tensor:
        """Sums over the channels of each layer."""
        sums = torch.zeros(
            len(values_BC), len(self.widths), dtype=torch.float64, device=values_BC.device
        )
        return sums.index_add_(1, self.layer_of, values_BC.double())

    def _by_row(self, values_C: Tensor) -> Tensor:
        """Sums over the channels of each gate."""
        sums = torch.zeros(len(self.heads.weight), dtype=torch.float64, device=values_C.device)
        return sums.index_add_(0, self.row_of, values_C)

    def _share(self, active_BL: Tensor) -> Tensor:
        return (macs_of_counts(active_BL, self.quadratic) + self.routing) / self.dense

    def _scales(self) -> Tensor:
        """The usual size of each layer's weights: what a threshold is measured by."""
        sums, rows = torch.zeros_like(self.widths), torch.zeros_like(self.widths)
        sizes = self.heads.weight.abs().mean(dim=1).double()
        sums.index_add_(0, self.layer_of_row, sizes)
        rows.index_add_(0, self.layer_of_row, torch.ones_like(sizes))
        return (sums / rows).clamp_min(1e-6)

    def _pressure(self, by_cost: bool) -> Tensor:
        if not by_cost:
            return torch.ones_like(self.widths)
        marginal = marginal_macs(self.quadratic, self.widths)
        return (marginal / marginal.mean()).sqrt()  # the root: costs span orders of magnitude

    def _raise_thresholds(self, shifts_L: Tensor) -> None:
        self.heads.weight.sub_(shifts_L.to(self.heads.weight.dtype)[self.layer_of_row][:, None])

    def _scale_open(self, factors_L: Tensor) -> None:
        """Scales gates that some image may open. Others would sink ever deeper, beyond return."""
        weight = self.heads.weight
        factors = factors_L.to(weight.dtype)[self.layer_of_row][:, None]
        weight.mul_(torch.where(weight.amax(dim=1, keepdim=True) > 0, factors, 1.0))

    def _collect_scores(self, model: DeepMoE, batches: Iterable[Batch]) -> Tensor:
        assert model.embedding is not None
        found, images = [], 0
        with evaluation_mode(model.embedding):
            for x_BCHW, _ in batches:
                e_BD, _ = model.embedding(model.placed(x_BCHW))
                scores = e_BD.to(self.heads.weight.dtype) @ self.heads.weight.T
                found.append(self.heads.per_channel(scores, dim=1))
                images += len(e_BD)
                if images >= CALIBRATION_IMAGES:
                    break
        return torch.cat(found)
