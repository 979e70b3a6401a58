"""What a user of the page may change: how much of the model runs for an image."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepmoe.costs import count_macs, dense_macs, least
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import size_of
from deepmoe.evaluation.curve import By, usual_way
from deepmoe.evaluation.exits import NEVER
from deepmoe.hard_moe import HardMoE
from deepmoe.layers import ScaleFactors
from deepmoe.model import DeepMoE, close_small

STEP = 0.01


@dataclass(frozen=True)
class Slider:
    """What is set, in which range, and where it starts."""

    by: By
    label: str
    info: str
    low: float
    high: float
    value: float


def slider_of(model: DeepMoE, info: DataInfo) -> Slider | str:
    """The slider for a model; for one that has a single operating point, a sentence that says why.

    Gated models have a budget of MACs: the image's smallest gates are closed, as by
    `deepmoe curve`. Models with exits, or with routes that are fixed, let the embedding answer.
    """
    reason = _why_not(model)
    if reason is not None:
        return reason
    if usual_way(model) == "gates":
        return _macs_slider(model, info)
    if info.task == "segmentation":
        return "The routes of this model's codebook are fixed, so there is no budget to set."
    return Slider(
        by="exits",
        label="Early exit: how sure the embedding must be to answer",
        info="Lower is cheaper: the base network then runs for fewer images. At 1 it always runs.",
        low=0.0,
        high=1.0,
        value=1.0 if model.exit_at is None else min(1.0, float(model.exit_at)),
    )


def _why_not(model: DeepMoE) -> str | None:
    if isinstance(model, HardMoE):
        return "Every image runs one whole expert, so there is no budget to set."
    if model.on_the_way:
        return "The gates are made while the network runs, so there is no budget to set ahead."
    if isinstance(model.heads, ScaleFactors):
        return "The scaling factors are the same for every image, so there is no budget to set."
    if model.embedding is None and model.unpruned is not None:
        return "A pruned network runs all channels it has left, so there is no budget to set."
    if model.embedding is None:
        return "A dense network runs all its channels for every image: there is no budget to set."
    return None


def _macs_slider(model: DeepMoE, info: DataInfo) -> Slider | str:
    dense = dense_macs(model, info.size)
    closed, opened = (
        float(count_macs(model, info.size, [make(1, width) for width in model.gating.widths]))
        for make in (torch.zeros, torch.ones)
    )
    low, high = _rounded_up(closed / dense), _rounded_up(opened / dense)
    if low >= high:
        return "The gated channels cost next to nothing, so there is no budget to set."
    return Slider(
        by="gates",
        label="Budget: share of the dense network's MACs",
        info="Where the image would cost more, its smallest gates are closed until it fits.",
        low=low,
        high=high,
        value=high,
    )


def set_budget(model: DeepMoE, runs: DeepMoE, slider: Slider, x_BCHW: Tensor, value: float) -> None:
    """Sets how much runs for an image.

    Args:
        model: as it was trained.
        runs: the same, or its sparse form: its thresholds or its exit are set.
        slider: of the model.
        x_BCHW: the image, as the model takes it.
        value: of the slider.

    Raises:
        UserError: for what is no number in the slider's range.
    """
    if not slider.low <= value <= slider.high:  # false for NaN, too
        raise UserError(f"a budget is from {slider.low:g} to {slider.high:g}, not {value:g}")
    if slider.by == "exits":
        off = value >= 1
        runs.exit_at = torch.tensor(NEVER if off else value, dtype=next(model.parameters()).dtype)
        runs.exit_vote = None if off else model.exit_vote  # the base network alone, at 1
    else:
        runs.thresholds = _thresholds_for(model, x_BCHW, value)


def _thresholds_for(model: DeepMoE, x_BCHW: Tensor, share: float) -> Tensor | None:
    """The lowest thresholds under which an image costs no more than a share of the dense MACs.

    As in `cost_curve`, they are in units of each layer's mean open gate, here of this image.
    """
    gates, _ = model.route(x_BCHW)
    assert gates is not None
    size, widths = size_of(x_BCHW), model.gating.widths
    most = share * dense_macs(model, size)
    g_C = torch.cat(gates, dim=1)[0]
    means = [g.sum() / (g != 0).sum().clamp_min(1) for g in g_C.split(widths)]
    means_C = torch.stack(means).repeat_interleave(torch.tensor(widths))

    def fits(level: float) -> bool:
        left = close_small(g_C, level * means_C)[None].split(widths, dim=1)
        return int(count_macs(model, size, left)) <= most

    levels = (g_C / means_C)[g_C > 0].unique()
    if fits(0.0) or not len(levels):
        return model.thresholds
    # Between gates, and not at one: the engine's differ in the last digits.
    between = torch.cat([(levels[1:] + levels[:-1]) / 2, 2 * levels[-1:]]).tolist()
    place = least(lambda place: fits(between[int(place)]), 0, len(between) - 1)
    thresholds_C = between[int(place)] * means_C
    if model.thresholds is None:
        return thresholds_C
    return torch.maximum(thresholds_C, model.thresholds)


def _rounded_up(share: float) -> float:
    return round(math.ceil(share / STEP) * STEP, 2)
