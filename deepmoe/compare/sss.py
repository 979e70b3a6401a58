"""Sparse Structure Selection (Huang and Wang 2018): scaling factors that learn to be zero.

Before, the network is trained with `heads.kind = "scale"`: each channel has a factor, and
`loss.sparsity` drives factors to zero by a proximal step. Then channels of the smallest factors
go, and the others' factors are multiplied into the weights that read them.
"""

import copy

import torch

from deepmoe.compare.task import Choice, PruningTask
from deepmoe.compare.widths import strongest
from deepmoe.errors import UserError
from deepmoe.graph import scale_inputs


@torch.no_grad()
def select(task: PruningTask) -> Choice:
    """The channels stay whose factors are largest."""
    if task.factors is None:
        raise UserError(
            "sss prunes a network that was trained with scaling factors: "
            'train.start is to be one of heads.kind = "scale"'
        )
    scores = [f.detach().abs().double().cpu() for f in task.factors]
    masks = strongest(scores, task.widths_by_threshold(scores))
    network = copy.deepcopy(task.model.network)
    scale_inputs(network, task.gating, torch.cat(list(task.factors)))
    return Choice(masks, network)
