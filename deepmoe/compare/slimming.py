"""Network Slimming (Liu et al. 2017): batch norm's scales learn under an L1 penalty.

Before, the network is trained with `loss.norm_sparsity`: many scales come close to zero. Then one
threshold for all layers decides, and every layer keeps a few. A channel goes with its shift: a
scale of zero alone would leave the shift to be read.
"""

from deepmoe.compare.method import Cell, Method, Step, changed, pruned_config
from deepmoe.compare.task import Choice, PruningTask, keep_strongest
from deepmoe.config import ANOTHER_RUN


def select(task: PruningTask) -> Choice:
    """The channels stay that batch norm scales most.

    Raises:
        UserError: for a network with convolutions that no batch norm follows.
    """
    scores = task.norm_scales()
    return keep_strongest(scores, task.widths_by_threshold(scores))


def plan(cell: Cell) -> list[Step]:
    """Training under the penalty, once for all costs; then pruning, and retraining."""
    cell.check_norms()
    residual = any(group.is_stream for group in cell.model().gating.graph.groups)
    penalty = {"loss.norm_sparsity": RESIDUAL_PENALTY if residual else PENALTY}
    before = Step(f"{cell.method}_trained", changed(cell.base, penalty))
    after = pruned_config(cell, "slimming", {"train.start": ANOTHER_RUN + before.name})
    return [before, Step(cell.name, after)]


PENALTY, RESIDUAL_PENALTY = 1e-4, 1e-5  # of the paper
SCHEDULE = {  # of the paper, for CIFAR: under the penalty, and again after pruning
    "train.epochs": 160,
    "train.finetune_epochs": 0,
    "train.batch_size": 64,
    "train.schedule": "step",
    "train.lr": 0.1,
    "train.milestones": (80, 120),
    "train.lr_decay": 0.1,
    "train.nesterov": True,
    "train.weight_decay": 1e-4,
}
METHOD = Method("slimming", "Network Slimming", "Liu et al. 2017", plan, select, published=SCHEDULE)
