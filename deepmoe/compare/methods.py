"""All methods, in the order of the table; those that prune also by what `train.prune_by` takes."""

from deepmoe.compare import (
    depgraph,
    fbs,
    hard_moe,
    he,
    li,
    noisy_topk,
    rnp,
    slimming,
    sss,
    strength,
    taylor,
    thinet,
)
from deepmoe.compare.method import Method
from deepmoe.compare.references import REFERENCES
from deepmoe.compare.task import Select
from deepmoe.errors import UserError
from deepmoe.schema import suggest

METHODS: tuple[Method, ...] = (
    li.INDEPENDENT,
    li.GREEDY,
    he.METHOD,
    thinet.METHOD,
    sss.METHOD,
    rnp.METHOD,
    hard_moe.METHOD,
    noisy_topk.METHOD,
    fbs.METHOD,
    taylor.METHOD,
    slimming.METHOD,
    depgraph.METHOD,
    strength.METHOD,
    *REFERENCES,
)
SELECTORS: dict[str, Select] = {m.name: m.select for m in METHODS if m.select is not None}


def method_named(name: str) -> Method:
    """The method of this name.

    Raises:
        UserError: where there is none.
    """
    found = {method.name: method for method in METHODS}
    if name not in found:
        raise UserError(
            f"no method is named {name!r}{suggest(name, found)}; there are {', '.join(found)}"
        )
    return found[name]
