"""The static methods by the names that `train.prune_by` takes."""

from deepmoe.compare import depgraph, he, li, slimming, strength, taylor, thinet
from deepmoe.compare.task import Select

SELECTORS: dict[str, Select] = {
    "taylor": taylor.select,
    "strength": strength.select,
    "li": li.independent,
    "li-greedy": li.greedy,
    "he": he.select,
    "thinet": thinet.select,
    "slimming": slimming.select,
    "depgraph": depgraph.select,
}
