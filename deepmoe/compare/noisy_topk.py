"""Noisy top-k gating (Shazeer et al. 2017), in the place of ReLU gates.

Every image runs the same number of channels in each layer, those of its largest gates. The share of
channels is such that the network costs what it may, embedding and heads included.
"""

import torch

from deepmoe.compare.method import Cell, Method, Step, changed
from deepmoe.config import RunConfig
from deepmoe.configured_models import model_from_config
from deepmoe.costs import cost_matrix, count_costs, dense_macs, largest, macs_of_counts
from deepmoe.errors import UserError
from deepmoe.layers.heads import kept_of


def plan(cell: Cell) -> list[Step]:
    """One run: the trained network under gates."""
    gated = {"model.gates": "inner", "heads.kind": "noisy-topk", "loss.balance": BALANCE}
    config = changed(cell.base, gated)
    return [Step(cell.name, changed(config, {"heads.share": _share_for(cell, config)}))]


def _share_for(cell: Cell, config: RunConfig) -> float:
    """The largest share of channels at which the network costs what it may."""
    with torch.device("meta"):
        model = model_from_config(config, cell.classes, size=cell.size, weights=False)
    costs, widths = count_costs(model, cell.size), model.gating.widths
    quadratic = cost_matrix(model.gating, cell.size)
    budget = cell.share * dense_macs(model, cell.size) - costs.embedding_macs - costs.gate_macs

    def fits(share: float) -> bool:
        kept = torch.tensor([kept_of(share, widths)], dtype=torch.float64)
        return macs_of_counts(kept, quadratic).item() <= budget

    if not fits(TINY):
        raise UserError(f"noisy top-k gates can't come down to {cell.share:g} of the dense MACs")
    return largest(fits, TINY, 1.0)


TINY = 1e-6
BALANCE = 0.01  # weight of the term that spreads images over channels
METHOD = Method("noisy-topk", "noisy top-k gates", "Shazeer et al. 2017", plan, dynamic=True)
