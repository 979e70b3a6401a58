"""Accuracy against cost of one trained model: gates below a threshold are closed at inference."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.evaluation.accuracy import Evaluation, evaluate
from deepmoe.evaluation.batches import Batches, batches_for
from deepmoe.evaluation.cut import refit_norms
from deepmoe.model import DeepMoE


@dataclass(frozen=True)
class CurvePoint:
    """A model with the gates below a threshold closed."""

    threshold: float  # in units of each layer's mean open gate
    result: Evaluation


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
    _check_gates(model)
    means_C = _mean_open_gates(model, batches)
    points = []
    for threshold in thresholds:
        cut = _with_thresholds(model, threshold * means_C, refit)
        points.append(CurvePoint(threshold, evaluate(cut, batches)))
    return points


def _check_gates(model: DeepMoE) -> None:
    if not model.gated or not sum(model.gating.widths):
        raise UserError("a dense network has no gates, so that its cost can't be changed")
    if model.codebook is not None:
        raise UserError("the routes of a codebook are fixed: its cost can't be changed")


def _with_thresholds(model: DeepMoE, thresholds_C: Tensor, refit: Loader | None) -> DeepMoE:
    """The model with thresholds, which never fall; a copy of its own where norms are refitted."""
    if model.thresholds is not None:
        thresholds_C = torch.maximum(thresholds_C, model.thresholds)
    if refit is None:
        return model.with_gates(thresholds=thresholds_C)
    cut = copy.deepcopy(model)
    cut.thresholds = thresholds_C
    # As they are, images would have other statistics than the network was trained with.
    refit_norms(cut, refit.epoch(0))
    return cut


def _mean_open_gates(model: DeepMoE, batches: Batches) -> Tensor:
    """The mean of each layer's open gates, one number a channel."""
    widths = model.gating.widths
    sums, opened = torch.zeros(2, len(widths), dtype=torch.float64)
    for x_BCHW, _ in batches_for(model, batches):
        gates, _ = model.route(x_BCHW)
        assert gates is not None
        sums += torch.stack([g.double().sum() for g in gates]).cpu()
        opened += torch.stack([(g > 0).sum() for g in gates]).cpu()
    means_L = (sums / opened.clamp_min(1)).to(next(model.parameters()))
    return means_L.repeat_interleave(torch.tensor(widths, device=means_L.device))
