"""Feature Boosting and Suppression (Gao et al. 2019): gates from each layer's own input.

Of the channels that a convolution makes, each image runs the same share: those with the largest
gates, which a small linear layer finds from what the convolution reads. It is lowered step by step.
"""

from deepmoe.compare.method import Cell, Method, Step, changed


def plan(cell: Cell) -> list[Step]:
    """One run: the trained network under gates that see its features."""
    gated = {
        "model.gates": "inner",
        "heads.kind": "fbs",
        "heads.lr_scale": RATE,
        "loss.sparsity": SPARSITY,
        "train.target_macs": cell.share,
    }
    return [Step(cell.name, changed(cell.base, gated))]


SPARSITY = 1e-8  # of the paper
RATE = 0.1  # of the gates, in units of the network's: at one, gates of trained networks run away
METHOD = Method("fbs", "FBS", "Gao et al. 2019", plan, dynamic=True)
