"""Network Slimming (Liu et al. 2017): batch norm's scales learn under an L1 penalty.

Before, the network is trained with `loss.norm_sparsity`: many scales come close to zero. Then one
threshold for all layers decides, and every layer keeps a few. A channel goes with its shift: a
scale of zero alone would leave the shift to be read.
"""

from deepmoe.compare.task import Choice, PruningTask, keep_strongest


def select(task: PruningTask) -> Choice:
    """The channels stay that batch norm scales most.

    Raises:
        UserError: for a network with convolutions that no batch norm follows.
    """
    scores = task.norm_scales()
    return keep_strongest(scores, task.widths_by_threshold(scores))
