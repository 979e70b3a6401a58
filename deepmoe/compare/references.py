"""What every method stands beside: the dense network, thin ones, and our own recipes."""

import torch

from deepmoe.compare.method import Cell, Method, Step, changed, pruned_config
from deepmoe.compare.widths import Widths, even_widths
from deepmoe.config import RunConfig
from deepmoe.costs import cost_matrix, macs_of_counts
from deepmoe.errors import UserError

LONGEST = 2.0  # epochs of a thin network, in units of the start's: Liu et al. double them at most
FIRST, SECOND = 0.5, 1.5  # costs of the two stages of a cascade, in units of its mean cost


def dense(cell: Cell) -> list[Step]:
    """The network with all channels, trained on as the others are."""
    return [Step(cell.name, cell.base)]


def thin(cell: Cell) -> list[Step]:
    """The shape that pruning leaves, trained from scratch as long as the start was."""
    kept, _ = _thin(cell)
    return [Step(cell.name, changed(_from_scratch(cell, 1.0), {"model.kept": kept}))]


def thin_long(cell: Cell) -> list[Step]:
    """The same for as much compute as the start had, but at most for twice its epochs."""
    kept, share = _thin(cell)
    share = max(share, 1 / LONGEST)
    return [Step(cell.name, changed(_from_scratch(cell, share), {"model.kept": kept}))]


def _from_scratch(cell: Cell, share: float) -> RunConfig:
    """A run without a start, whose epochs cost a share of the dense network's."""
    train, epochs = cell.base.train, round(cell.start_epochs / share)
    stretched = tuple(round(m * epochs / train.epochs) for m in train.milestones)
    settings = {"train.start": None, "train.epochs": epochs, "train.milestones": stretched}
    return changed(cell.base, settings)


def _thin(cell: Cell) -> tuple[Widths, float]:
    """Channels of each group, and the share of the MACs that they cost."""
    gating = cell.prunable()
    streams = [gating.graph.groups[number].is_stream for number in gating.gated]
    kept = even_widths(gating, cell.size, cell.share, streams)
    counts = torch.tensor([kept, gating.widths], dtype=torch.float64)
    left, whole = macs_of_counts(counts, cost_matrix(gating, cell.size)).tolist()
    return kept, left / whole


def gates(cell: Cell) -> list[Step]:
    """The paper's ReLU gates, under a budget."""
    asked = {
        "model.gates": "inner",
        "heads.kind": "relu",
        "heads.init": SPLIT,
        "train.target_macs": cell.share,
    }
    return [Step(cell.name, changed(cell.base, asked))]


def ours(cell: Cell) -> list[Step]:
    """Pruning by importance, with channels where they are worth most."""
    return [Step(cell.name, pruned_config(cell, "taylor", tilt=TILT))]


def with_exits(cell: Cell) -> list[Step]:
    """The same behind a narrow network that answers easy images; exits are fitted afterwards."""
    if cell.share >= 1:
        raise UserError("exits make a network cheaper: with ours-exits, --macs are below 1")
    cascade = {
        "train.prune": min(1.0, round(SECOND * cell.share, 6)),
        "model.exits": True,
        "embedding.form": "network",
        "embedding.prune": round(FIRST * cell.share, 6),
    }
    if cell.base.train.teacher is not None:
        cascade["loss.embedding_distillation"] = cell.base.loss.distillation
    return [Step(cell.name, pruned_config(cell, "taylor", cascade, tilt=TILT))]


TILT = 0.5  # as `train.prune_tilt` by default
SPLIT = "split(0.7)"
REFERENCES = (
    Method("dense", "dense, trained on", "the network itself", dense, one_cost=True),
    Method("thin", "thin, from scratch, equal epochs", "Liu et al. 2019", thin),
    Method("thin-long", "thin, from scratch, equal compute", "Liu et al. 2019", thin_long),
    Method("gates", "DeepMoE, ReLU gates", "Wang et al. 2019", gates, dynamic=True),
    Method("ours", "Taylor, uneven widths (ours)", "this package", ours),
    Method(
        "ours-exits",
        "Taylor, uneven widths, exits (ours)",
        "this package",
        with_exits,
        dynamic=True,
        fits_exits=True,
    ),
)
