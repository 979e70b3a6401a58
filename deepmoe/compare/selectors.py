"""The static methods by the names that `train.prune_by` takes."""

from deepmoe.compare import li, slimming, sss, strength, taylor
from deepmoe.compare.task import Select

SELECTORS: dict[str, Select] = {
    "taylor": taylor.select,
    "strength": strength.select,
    "li": li.independent,
    "li-greedy": li.greedy,
    "sss": sss.select,
    "slimming": slimming.select,
}
