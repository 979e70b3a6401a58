"""Accuracy against cost of one trained model: less of it runs, by closed gates or by exits."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.evaluation.accuracy import Evaluation, evaluate
from deepmoe.evaluation.batches import Batches, batches_for
from deepmoe.evaluation.cut import refit_norms
from deepmoe.evaluation.exit_answers import collect_answers
from deepmoe.hard_moe import refuse_experts
from deepmoe.model import DeepMoE
from deepmoe.progress import followed

By = Literal["gates", "exits"]
LEVELS: dict[By, tuple[float, ...]] = {
    "gates": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5),
    "exits": (1.01, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3),  # no embedding is surer than 1
}


@dataclass(frozen=True)
class CurvePoint:
    """A model with the gates below a threshold closed, or exits for images above a confidence."""

    threshold: float  # of gates: in units of each layer's mean open gate
    result: Evaluation


def cost_curve(
    model: DeepMoE,
    batches: Batches,
    thresholds: Sequence[float] | None = None,
    refit: Loader | None = None,
    *,
    by: By | None = None,
) -> list[CurvePoint]:
    """Accuracy and cost of a model for each threshold.

    Args:
        model: with gates, and without a codebook, whose routes are fixed; or with an embedding.
        batches: to evaluate on; by exits gone through once, by gates once for each threshold and
            once before.
        thresholds: of gates: in units of each layer's mean open gate, so that layers whose gates
            are all small are not closed first. Of exits: how sure the embedding must be to answer,
            up to 1; it never does above that. Some that are usual, if not given.
        refit: of gates: training images, augmented as in training, on which the base network's
            batch norms are measured anew for each threshold: what they see changes with the gates.
            `None` leaves them as they are.
        by: `gates` closes small gates, `exits` lets the embedding answer the images that it is sure
            of. What `usual_way` gives, if not given.

    Raises:
        UserError: for a model that has no gates of its own to close, or no embedding to answer.
    """
    refuse_experts(model, "it has neither gates nor exits, so that its cost can't be changed")
    by = by or usual_way(model)
    if by not in LEVELS:
        raise UserError(f"a curve goes by gates or exits, not by {by!r}")
    levels = LEVELS[by] if thresholds is None else thresholds
    if by == "gates":
        return _gate_curve(model, batches, levels, refit)
    if refit is not None:
        raise UserError("batch norm is refitted where gates are closed: exits don't change it")
    answers = collect_answers(model, batches)
    return [CurvePoint(level, answers.evaluation(level)) for level in levels]


def usual_way(model: DeepMoE) -> By:
    """By what the cost of a model is changed: by exits where it has some, or no gates to close."""
    if model.embedding is None:
        return "gates"
    closes = model.gated and model.codebook is None and model.exit_at is None
    return "gates" if closes else "exits"


@torch.inference_mode()
def _gate_curve(
    model: DeepMoE, batches: Batches, thresholds: Sequence[float], refit: Loader | None
) -> list[CurvePoint]:
    _check_gates(model)
    means_C = _mean_open_gates(model, batches)
    points = []
    for threshold in followed(thresholds, "curve", len(thresholds), "points"):
        cut = _with_thresholds(model, threshold * means_C, refit)
        points.append(CurvePoint(threshold, evaluate(cut, batches)))
    return points


def _check_gates(model: DeepMoE) -> None:
    model.check_ahead()
    if not model.gated or not sum(model.gating.widths):
        raise UserError("a dense network has no gates to close, so its cost can't be changed")
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
    for x_BCHW, _ in batches_for(model, batches, doing="measuring gates"):
        gates, _ = model.route(x_BCHW)
        assert gates is not None
        sums += torch.stack([g.double().sum() for g in gates]).cpu()
        opened += torch.stack([(g > 0).sum() for g in gates]).cpu()
    means_L = (sums / opened.clamp_min(1)).to(next(model.parameters()))
    return means_L.repeat_interleave(torch.tensor(widths, device=means_L.device))
