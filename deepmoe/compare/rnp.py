"""Runtime Neural Pruning (Lin et al. 2017): an agent decides layer by layer how many groups run.

A recurrent agent looks at what each layer reads, and learns by Q-learning which of four groups of
channels pay. Agent and network are trained in turn. What a group costs the agent is steered so that
the network comes down to the cost that is asked for.
"""

from deepmoe.compare.method import Cell, Method, Step, changed


def plan(cell: Cell) -> list[Step]:
    """One run: the trained network and its agent."""
    train = cell.base.train
    gated = {
        "model.gates": "inner",
        "heads.kind": "rnp",
        "heads.lr_scale": RATE,
        "train.target_macs": cell.share,
        # Every other epoch is the agent's: the network is to learn as long as others do.
        "train.epochs": 2 * train.epochs,
        "train.milestones": tuple(2 * milestone for milestone in train.milestones),
    }
    return [Step(cell.name, changed(cell.base, gated))]


RATE = 0.3  # of the agent, in units of the network's
METHOD = Method("rnp", "RNP", "Lin et al. 2017", plan, dynamic=True)
