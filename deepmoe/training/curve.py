"""Accuracy against cost of one trained model: gates below a threshold are closed at inference."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.layers import GateHeads, Gates, NoisyTopKHeads, close_small
from deepmoe.model import DeepMoE, evaluation_mode
from deepmoe.training.evaluate import Batches, EvalResult, evaluate

REFIT_IMAGES = 4000


@dataclass(frozen=True)
class CurvePoint:
    """A model with the gates below a threshold closed."""

    threshold: float  # in units of each layer's mean open gate
    result: EvalResult


class ThresholdHeads(nn.Module):
    """Gate heads whose small gates are closed.

    Args:
        heads: that give the gates.
        thresholds: one a layer; smaller gates become zero, others stay as they are.
    """

    def __init__(self, heads: GateHeads | NoisyTopKHeads, thresholds: Sequence[float]) -> None:
        super().__init__()
        self.heads = heads
        self.thresholds = thresholds

    @property
    def weight(self) -> Tensor:
        """Of the heads, by which their cost is counted."""
        return self.heads.weight

    def forward(self, e_BD: Tensor) -> Gates:
        return close_small(self.heads(e_BD), self.thresholds)


@torch.inference_mode()
def cost_curve(
    model: DeepMoE,
    batches: Batches,
    thresholds: Sequence[float],
    refit: Loader | None = None,
) -> list[CurvePoint]:
    """Evaluates a model once for each threshold.

    Args:
        model: a gated model without a codebook, whose routes are fixed.
        batches: to evaluate on; gone through once for each threshold, and once before.
        thresholds: in units of each layer's mean open gate, so that layers whose gates are all
            small are not closed first.
        refit: training images, augmented as in training, on which the base network's batch norms
            are measured anew for each threshold: what they see changes with the gates. `None`
            leaves them as they are.

    Raises:
        UserError: for a model that has no gates of its own to close.
    """
    if not model.gated or model.heads is None:
        raise UserError("a dense network has no gates, so that its cost can't be changed")
    if model.codebook is not None:
        raise UserError("the routes of a codebook are fixed: its cost can't be changed")
    means = _mean_open_gates(model, batches)
    points = []
    for threshold in thresholds:
        heads = ThresholdHeads(model.heads, [threshold * mean for mean in means])
        backbone = model.backbone if refit is None else copy.deepcopy(model.backbone)
        cut = DeepMoE(model.embedding, heads, backbone)  # type: ignore[arg-type]
        if refit is not None:
            # As they are, images would have other statistics than the network was trained with.
            refit_norms(cut, refit.epoch(0))
        points.append(CurvePoint(threshold, evaluate(cut, batches)))
    return points


@torch.no_grad()
def refit_norms(model: DeepMoE, batches: Batches) -> None:
    """Measures mean and variance of the base network's layers on given images."""
    norms = [m for m in model.backbone.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta, seen = [norm.momentum for norm in norms], 0
    with evaluation_mode(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
        for x_BCHW, _ in batches:
            seen += len(x_BCHW)
            for norm in norms:
                norm.momentum = len(x_BCHW) / seen  # all images count alike
            model(model.placed(x_BCHW))
            if seen >= REFIT_IMAGES:
                break
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _mean_open_gates(model: DeepMoE, batches: Batches) -> list[float]:
    sums = opened = torch.zeros(len(model.backbone.gate_widths), dtype=torch.float64)
    with evaluation_mode(model):
        for x_BCHW, _ in batches:
            gates, _ = model.route(model.placed(x_BCHW))
            assert gates is not None
            sums = sums + torch.stack([g.double().sum() for g in gates]).cpu()
            opened = opened + torch.stack([(g > 0).sum() for g in gates]).cpu()
    return [float(s / max(1, o)) for s, o in zip(sums.tolist(), opened.tolist(), strict=True)]
