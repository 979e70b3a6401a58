"""Accuracy against cost of one trained model: gates below a threshold are closed at inference."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepmoe.costs import Size, count_costs, count_macs
from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.model import DeepMoE, close_small, evaluation_mode
from deepmoe.training.evaluate import Batches, EvalResult, evaluate, gates_of_images

REFIT_IMAGES = 4000
CUT_IMAGES = 4000  # that a threshold is found on
BISECTIONS = 30
TOLERANCE = 0.005  # of the dense MACs: what may be cut beyond the share that was asked for
COARSE = 0.05  # and how much less it may be where gates close in steps
ROUNDING = 1e-4  # gates that are no further apart are alike


@dataclass(frozen=True)
class CurvePoint:
    """A model with the gates below a threshold closed."""

    threshold: float  # in units of each layer's mean open gate
    result: EvalResult


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
    with evaluation_mode(model):
        means_C = _mean_open_gates(_routes(model, batches), model.backbone.gate_widths)
    points = []
    for threshold in thresholds:
        cut = _with_thresholds(model, threshold * means_C, refit)
        points.append(CurvePoint(threshold, evaluate(cut, batches)))
    return points


@torch.no_grad()
def cut_to(
    model: DeepMoE, size: Size, share: float, batches: Batches, refit: Loader
) -> tuple[DeepMoE, float]:
    """A model of lower cost: its small gates closed, its batch norms measured anew.

    Args:
        model: a gated model without a codebook.
        size: of its input images.
        share: of the dense base network's MACs that an image is to cost on average.
        batches: images to find the threshold on.
        refit: training images, for the norms.

    Returns:
        The model, and its threshold in units of each layer's mean open gate.

    Raises:
        UserError: for a model without gates to close, or a share that closing them can't reach.
    """
    _check_gates(model)
    g_NC = gates_of_images(model, batches, CUT_IMAGES)
    widths, dense = model.backbone.gate_widths, count_costs(model, size).macs
    means_C = _mean_open_gates([g_NC] if len(g_NC) else [], widths)

    def share_at(threshold: float) -> float:
        kept = close_small(g_NC, threshold * means_C).split(widths, dim=1)
        return float(count_macs(model, size, kept).double().mean()) / dense

    ratios_NC = g_NC / means_C.clamp_min(1e-12)
    most = 1.0 + float(ratios_NC.max())
    if not share_at(most) <= share <= share_at(0.0):
        least, whole = math.ceil(1000 * share_at(most)), math.floor(1000 * share_at(0.0))
        raise UserError(
            f"closing gates can't reach {share:g} of the dense MACs: this model "
            f"goes from {least / 1000:g} to {whole / 1000:g}"
        )

    def threshold_for(goal: float) -> float:
        low, high = 0.0, most
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if share_at(middle) <= goal else (middle, high)
        return high

    lowest = threshold_for(share)
    reached = share_at(lowest + ROUNDING)
    if reached < share - COARSE:
        raise UserError(
            f"this model's gates are too much alike to reach {share:g} of the dense MACs: "
            f"closing the next ones leaves {reached:.3f}"
        )
    # A little higher, where gates lie apart: rounding is not to decide on them.
    highest = threshold_for(reached - TOLERANCE)
    near = ratios_NC[(ratios_NC > lowest) & (ratios_NC < highest)]
    steps = torch.cat([near, torch.tensor([lowest, highest]).to(near)]).sort().values
    widest = int(steps.diff().argmax())
    threshold = float(steps[widest : widest + 2].mean())
    return _with_thresholds(model, threshold * means_C, refit).eval(), threshold


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


def _check_gates(model: DeepMoE) -> None:
    if not model.gated or not sum(model.backbone.gate_widths):
        raise UserError("a dense network has no gates, so that its cost can't be changed")
    if model.codebook is not None:
        raise UserError("the routes of a codebook are fixed: its cost can't be changed")


def _with_thresholds(model: DeepMoE, thresholds_C: Tensor, refit: Loader | None) -> DeepMoE:
    """The model with thresholds, which never fall; a copy of its own where norms are refitted."""
    if model.thresholds is not None:
        thresholds_C = torch.maximum(thresholds_C, model.thresholds)
    if refit is None:
        return DeepMoE(model.embedding, model.heads, model.backbone, thresholds=thresholds_C)
    cut = copy.deepcopy(model)
    cut.thresholds = thresholds_C
    # As they are, images would have other statistics than the network was trained with.
    refit_norms(cut, refit.epoch(0))
    return cut


def _routes(model: DeepMoE, batches: Batches) -> Iterator[Tensor]:
    """All gates of each batch, side by side."""
    for x_BCHW, _ in batches:
        gates, _ = model.route(model.placed(x_BCHW))
        assert gates is not None
        yield torch.cat(gates, dim=1)


def _mean_open_gates(routes: Iterable[Tensor], widths: Sequence[int]) -> Tensor:
    """The mean of each layer's open gates, one number a channel."""
    sums, opened = torch.zeros(2, len(widths), dtype=torch.float64)
    g_BC = None
    for g_BC in routes:
        layers = g_BC.split(list(widths), dim=1)
        sums += torch.stack([g.double().sum() for g in layers]).cpu()
        opened += torch.stack([(g > 0).sum() for g in layers]).cpu()
    if g_BC is None:
        raise ValueError("the loader gave no images")
    means_L = (sums / opened.clamp_min(1)).to(g_BC)
    return means_L.repeat_interleave(torch.tensor(widths, device=means_L.device))
