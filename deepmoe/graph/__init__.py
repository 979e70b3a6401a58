"""Any convolutional network as data, captured once: everything else is a function of it."""

from deepmoe.graph.capture import evaluation_mode
from deepmoe.graph.describing import describe
from deepmoe.graph.features import without_classifier
from deepmoe.graph.gating import (
    Gating,
    NothingToGate,
    check_kept,
    choose,
    open_groups,
    prunable,
    why_not,
    with_kept,
)
from deepmoe.graph.graph import Graph, Group, Layer
from deepmoe.graph.narrow import narrowed, narrowed_graph
from deepmoe.graph.scales import absorb_scales
from deepmoe.graph.strengths import channel_strengths, have_norms, norm_scales, scale_inputs

__all__ = [
    "Gating",
    "Graph",
    "Group",
    "Layer",
    "NothingToGate",
    "absorb_scales",
    "channel_strengths",
    "check_kept",
    "choose",
    "describe",
    "evaluation_mode",
    "have_norms",
    "narrowed",
    "narrowed_graph",
    "norm_scales",
    "open_groups",
    "prunable",
    "scale_inputs",
    "why_not",
    "with_kept",
    "without_classifier",
]
