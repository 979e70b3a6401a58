"""Network Slimming (Liu et al. 2017): batch norm's scales learn under an L1 penalty.

Before, the network is trained with `loss.norm_sparsity`: many scales come close to zero. Then one
threshold for all layers decides, and every layer keeps a few. A channel goes with its shift: a
scale of zero alone would leave the shift to be read.
"""

import torch
from torch import Tensor

from deepmoe.compare.task import Choice, PruningTask, keep_strongest, unit_sums
from deepmoe.errors import UserError


def select(task: PruningTask) -> Choice:
    """The channels stay that batch norm scales most."""
    scores = norm_scales(task)
    return keep_strongest(scores, task.widths_by_threshold(scores))


@torch.no_grad()
def norm_scales(task: PruningTask) -> list[Tensor]:
    """For each group, the scale that batch norm gives each channel; their mean if several do.

    Raises:
        UserError: for a group without one.
    """
    sums, counts = unit_sums(task), unit_sums(task)
    for path, module in task.model.network.named_modules():
        units = task.gating.graph.followers.get(f"{path}.running_mean")
        if units is not None and module.weight is not None:
            sums.index_add_(0, units % len(sums), module.weight.abs().double().cpu())
            counts.index_add_(0, units % len(sums), torch.ones(len(units), dtype=torch.float64))
    for group, count, fixed in zip(task.groups, task.by_unit(counts), task.fixed, strict=True):
        if not fixed and not bool(count.all()):
            raise UserError(
                f"slimming needs batch norm behind every convolution, and {group.name} has none"
            )
    return task.by_unit(sums / counts.clamp_min(1))
