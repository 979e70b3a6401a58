"""Untrained models of every kind, as a demo takes them."""

import torch
from helpers import randomise_statistics, tiny_config
from torch import nn

from deepmoe.checkpoint import Checkpoint, TrainState
from deepmoe.configured_models import model_from_config
from deepmoe.data import DataInfo
from deepmoe.layers import RouteCodebook
from deepmoe.model import confidence

NASTY = "<img src=x onerror=boom()> ${1+1} {{1+1}} $x^$"
NAMES = tuple(f"{i} {NASTY} \x1b[31m" for i in range(10))
DRN = ("model.name=drn_a_50", f"model.widths={[4] * 32}", "embedding.widths=[4, 4]")
OF_KIND: dict[str, tuple[str, ...]] = {
    "gated": (),
    "dense": ("model.gates=none",),
    "pruned": ("model.gates=none", "model.kept=[2, 3, 1, 4, 2, 2, 3, 1, 4]"),
    "exits": ("model.gates=none", "model.exits=true"),
    "codes": (),
    "experts": ("model.gates=none", "model.experts=2"),
    "on the way": ("heads.kind=fbs",),
    "segmentation": DRN,
}


def make(kind: str) -> Checkpoint:
    """A model with random weights, whose images differ in what they run."""
    config = tiny_config(*OF_KIND[kind])
    task = "segmentation" if kind == "segmentation" else "classification"
    size = (24, 40) if kind == "segmentation" else (8, 8)
    info = DataInfo(NAMES, size, (0.5,) * 3, (0.25,) * 3, task)
    model = randomise_statistics(model_from_config(config, len(NAMES), size=size)).eval()
    if kind in ("gated", "codes", "segmentation"):
        nn.init.normal_(model.heads.weight)
        nn.init.normal_(model.embedding.project.weight, std=10.0)
    images = torch.randn(8, 3, *size)
    with torch.no_grad():
        if kind == "codes":
            routes = torch.cat(model.heads(model.embedding(images)[0]), dim=1).unique(dim=0)[:2]
            widths = model.gating.widths
            model.codebook = RouteCodebook(routes, torch.ones(routes.shape[1]), widths)
        if kind == "exits":
            model.exit_at = confidence(model.embedding(images)[1]).max().clone()
    return Checkpoint(model, config, info, TrainState(), {})
