"""Whether a run can come down to the cost that is asked of it: told before anything is trained."""

import torch

from deepmoe.compare.method import Cell, Step
from deepmoe.compare.methods import method_named
from deepmoe.compare.widths import even_widths
from deepmoe.config import RunConfig
from deepmoe.configured_models import model_from_config
from deepmoe.costs import cost_matrix, count_costs, dense_macs, macs_of_counts
from deepmoe.errors import UserError
from deepmoe.sources import is_source


def check_reach(cell: Cell, step: Step) -> None:
    """Refuses a step whose cost is out of reach.

    Raises:
        UserError: where even the fewest channels cost more.
    """
    train = step.config.train
    for share in (train.prune, step.config.embedding.prune):
        if share is not None:
            gating = cell.prunable()
            streams = [gating.graph.groups[number].is_stream for number in gating.gated]
            fixed = [False] * len(streams) if method_named(train.prune_by).streams else streams
            even_widths(gating, cell.size, share, fixed)
    if train.target_macs is not None:
        _check_gates(cell, step.config, train.target_macs)


def _check_gates(cell: Cell, config: RunConfig, share: float) -> None:
    with torch.device("cpu" if is_source(config.model.name) else "meta"):
        model = model_from_config(config, cell.classes, size=cell.size, weights=False)
    costs, ones = count_costs(model, cell.size), [[1.0] * len(model.gating.widths)]
    fewest = macs_of_counts(
        torch.tensor(ones, dtype=torch.float64), cost_matrix(model.gating, cell.size)
    ).item()
    least = (fewest + costs.embedding_macs + costs.gate_macs) / dense_macs(model, cell.size)
    if share < least:
        raise UserError(
            f"{cell.method} can't come down to {share:g} of the dense MACs: with one channel of "
            f"each layer it costs {least:.3f} of them"
        )
