"""Hard Mixtures of Experts (Gross et al. 2017): k-means chooses one expert an image.

The network that makes the features costs as much as one expert: both are the trained network,
pruned to half of what the whole may cost. Each expert is trained on its cluster's images alone.
"""

import dataclasses

from deepmoe.compare.method import Cell, Method, Step, changed, pruned_config
from deepmoe.config import ANOTHER_RUN

EXPERTS = 4


def plan(cell: Cell) -> list[Step]:
    """The network that features are of, and its experts."""
    half = dataclasses.replace(cell, share=round(cell.share / 2, 6))
    features = Step(f"{cell.name}_features", pruned_config(half, "li"))
    experts = {"model.experts": EXPERTS, "train.start": ANOTHER_RUN + features.name}
    return [features, Step(cell.name, changed(cell.base, experts))]


METHOD = Method("hard-moe", f"Hard MoE, {EXPERTS} experts", "Gross et al. 2017", plan, dynamic=True)
