"""Configurations of earlier versions: what became of settings that are gone. No torch here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from deepmoe.errors import UserError

SCHEMA = 3
"""The version that configurations are written in; those without one are of version 1."""


class Removed(NamedTuple):
    """A setting that is gone."""

    neutral: tuple[Any, ...]  # values that asked for nothing: dropped without a word
    advice: str  # what to do where it asked for something


REMOVED = {
    "embedding.temperature": Removed((None,), "leave it out"),
    "heads.group": Removed((1,), "leave it out: every channel has a gate of its own"),
    "heads.revive": Removed((None, 0), "leave it out: a budget opens closed gates again by itself"),
    "data.mixup": Removed((0,), "leave it out"),
    "train.budget_by_cost": Removed((False,), "leave it out: all layers feel the same pressure"),
    "train.random_threshold": Removed((0,), "train for one cost, and use deepmoe cut for others"),
}


def upgraded(values: Mapping[str, Any], *, used: bool = False) -> dict[str, Any]:
    """A configuration of any version as the present one would write it, its version left out.

    Args:
        values: nested plain values.
        used: of a network that is only used, not trained: settings of training that are gone
            don't matter to it, whatever they are.

    Raises:
        UserError: for a later version, or where a setting that is gone asked for something.
    """
    values = dict(values)
    schema = values.pop("schema", 1)
    if type(schema) is not int or schema < 1:
        raise UserError(f"schema must be the version of a configuration, not {schema!r}")
    if schema > SCHEMA:
        raise UserError(
            f"the configuration has schema {schema}, of a later deepmoe; "
            f"this one reads up to {SCHEMA}"
        )
    heads = values.get("heads")
    if schema < 3 and isinstance(heads, Mapping) and heads.get("kind") == "noisy-topk":
        values["heads"] = {"total": "one", **heads}  # what they were trained with
    for key, removed in REMOVED.items():
        table, _, name = key.partition(".")
        if not isinstance(values.get(table), Mapping) or name not in values[table]:
            continue
        value = values[table][name]
        # Compared by type as well: True is not a number here.
        neutral = any(
            value == v and isinstance(value, bool) == isinstance(v, bool) for v in removed.neutral
        )
        if not neutral and not used:
            raise UserError(f"config key {key} = {value!r} was removed: {removed.advice}")
        values[table] = {k: v for k, v in values[table].items() if k != name}
    return values
