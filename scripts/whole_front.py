"""The whole front: networks pruned, with exits, thin from scratch, and with the paper's gates.

    python scripts/whole_front.py runs/cifar10_front --data PATH --out front.json

Runs are named by network and cost: `vgg16_12` is pruned to 12 % of the MACs, with an embedding
beside it, `vgg16_thin_12` is trained from scratch, and `vgg16_gates_12` has gates.
"""

import re
from typing import Any

from exit_front import EMBEDDING, NETWORK, Answerer, Front, write_figures

from deepmoe.sweep.grid import group_of

NETWORKS = ("vgg16", "resnet56")
KINDS = ("thin", "gates")


def figures_of(runs: Front) -> dict[str, Any]:
    """Figures of each network that was trained, at each cost."""
    groups = sorted({group_of(name) for name in runs.names})
    return {
        network: points(runs, groups, network)
        for network in NETWORKS
        if any(group.startswith(network) for group in groups)
    }


def points(runs: Front, groups: list[str], network: str) -> list[dict[str, Any]]:
    """All rows of a network at each cost that one was trained for."""
    pruned = sorted(
        (name for name in groups if re.fullmatch(rf"{network}_\d+", name) and name in runs),
        key=_percent,
    )
    asked = {_percent(name) for name in pruned}
    asked |= {_percent(name) for name in groups for kind in KINDS if f"{network}_{kind}_" in name}
    # Embeddings of one size are alike, whatever they were trained beside: one of each will do.
    sizes = {runs.costs(f"{name}-seed0")[2]: name for name in pruned}
    firsts = [Answerer(name, EMBEDDING) for name in sizes.values()]
    firsts += [Answerer(name, NETWORK) for name in pruned]
    found = []
    dense = next(runs.costs(name)[1] for name in runs.names if group_of(name).startswith(network))
    for percent in sorted(asked):
        names = {"pruned": f"{network}_{percent}"}
        names |= {kind: f"{network}_{kind}_{percent}" for kind in KINDS}
        alone = {kind: runs.static(name) for kind, name in names.items() if name in runs}
        macs = percent / 100 * dense
        found.append({"share": percent / 100, **alone, **runs.best(firsts, pruned, macs)})
    return found


def _percent(name: str) -> int:
    return int(name.rpartition("_")[2])


if __name__ == "__main__":
    write_figures("whole_front.py", __doc__, figures_of)
