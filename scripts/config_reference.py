"""The reference of every configuration key, from the code: types, defaults, ranges, comments."""

import ast
import dataclasses
import inspect
import types
import typing
from typing import Any

from deepmoe import config
from deepmoe.config_checks import FEWEST_EXPERTS, HUGE, MOST_EXPERTS, RANGES, TINY
from deepmoe.results import markdown_table
from deepmoe.schema import Gates, Paths, Schedule, Widths

WORDS = {
    Widths: "name or list of int",
    Paths: "path or list of paths",
    Gates: "`inner`, `all`, `none` or list of layers",
    Schedule: "float, or list of [epoch, value]",
}
EXPERTS = {"model.experts": (FEWEST_EXPERTS, MOST_EXPERTS)}


def config_tables() -> str:
    """One table for each part of the configuration."""
    parts = []
    for table in dataclasses.fields(config.RunConfig):
        assert isinstance(table.type, type)
        about, rows = inspect.getdoc(table.type), config_keys(table.name, table.type)
        header = ["key", "type", "default", "range", "what it does"]
        parts += [f"## {table.name}", str(about), markdown_table(header, rows)]
    return "\n\n".join(parts)


def config_keys(table: str, cls: type) -> list[tuple[str, str, str, str, str]]:
    """Key, type, default, range and description of each field."""
    told = _comments(cls)
    kinds = typing.get_type_hints(cls)
    return [
        (
            f"`{table}.{field.name}`",
            _type(kinds[field.name]),
            _default(field.default),
            _range(f"{table}.{field.name}"),
            told[field.name],
        )
        for field in dataclasses.fields(cls)
    ]


def _comments(cls: type) -> dict[str, str]:
    """What stands beside each field, or in the lines above it."""
    lines = inspect.getsource(cls).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above, number = [], node.lineno - 2
            while lines[number].lstrip().startswith("#"):
                above.insert(0, lines[number].strip(" #"))
                number -= 1
            beside = lines[(node.end_lineno or 1) - 1][node.end_col_offset :].strip(" #")
            found[node.target.id] = " ".join([*above, beside]).strip().removesuffix(".")
    return found


def _type(kind: Any) -> str:
    if kind in WORDS:
        return WORDS[kind]
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return _type_of_optional(kind)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        return f"list of {inner[0].__name__}" if ... in inner else f"two {inner[0].__name__}s"
    return kind.__name__


def _type_of_optional(kind: Any) -> str:
    inner = tuple(k for k in typing.get_args(kind) if k is not type(None))
    for known, word in WORDS.items():
        if set(inner) == set(typing.get_args(known)):
            return word
    return " or ".join(map(_type, inner))


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _range(key: str) -> str:
    bounds = RANGES.get(key) or EXPERTS.get(key)
    if bounds is None:
        return ""
    low, high = bounds
    if high == -TINY:
        return "below 0"
    if high == HUGE:
        return "above 0" if low == TINY else f"{_number(low)} or more"
    start = "above 0, up to" if low == TINY else f"{_number(low)} to"
    return f"{start} {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and value < HUGE else f"{value:g}"
