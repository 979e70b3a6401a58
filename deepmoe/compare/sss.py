"""Sparse Structure Selection (Huang and Wang 2018): scaling factors that learn to be zero.

Before, the network is trained with `heads.kind = "scale"`: each channel has a factor, and
`loss.sparsity` drives factors to zero by a proximal step. Then channels of the smallest factors
go, and the others' factors are multiplied into the weights that read them.
"""

import copy

import torch

from deepmoe.compare.method import Cell, Method, Step, changed, pruned_config
from deepmoe.compare.task import Choice, PruningTask
from deepmoe.compare.widths import strongest
from deepmoe.config import ANOTHER_RUN
from deepmoe.errors import UserError
from deepmoe.graph import Gating, scale_inputs


@torch.no_grad()
def select(task: PruningTask) -> Choice:
    """The channels stay whose factors are largest."""
    if task.factors is None:
        raise UserError(
            "sss prunes a network that was trained with scaling factors: "
            'set train.start to one with heads.kind = "scale"'
        )
    scores = [f.detach().abs().double().cpu() for f in task.factors]
    masks = strongest(scores, task.widths_by_threshold(scores))
    network = copy.deepcopy(task.model.network)
    scale_inputs(network, task.gating, torch.cat(list(task.factors)))
    return Choice(masks, network)


def plan(cell: Cell) -> list[Step]:
    """Training with factors, once for all costs; then pruning, and retraining."""
    cell.check_norms()
    groups = cell.prunable()
    names = [groups.graph.groups[n].name for n in groups.gated if not _is_stream(groups, n)]
    factors = {
        "heads.kind": "scale",
        "model.gates": tuple(names),
        "loss.sparsity": SHRINKAGE,
        "loss.embedding": 0.0,
        "train.nesterov": True,
    }
    before = Step(f"{cell.method}_factors", changed(cell.base, factors))
    after = pruned_config(cell, "sss", {"train.start": ANOTHER_RUN + before.name})
    return [before, Step(cell.name, after)]


def _is_stream(gating: Gating, number: int) -> bool:
    return gating.graph.groups[number].is_stream


SHRINKAGE = 0.01  # of the paper, for ResNet-50
METHOD = Method("sss", "Sparse Structure Selection", "Huang and Wang 2018", plan, select)
