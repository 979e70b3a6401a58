"""From plain values (TOML, JSON) to frozen dataclasses, strictly, and back."""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import cattrs

from deepmoe.errors import UserError

T = TypeVar("T")
Widths = str | tuple[int, ...]
"""Numbers of channels, or the name of a list of them."""
Paths = str | tuple[str, ...]
"""One path, or several."""
Gates = Literal["inner", "all", "none"] | tuple[str, ...]
"""Which channels are gated: by a word, or by names of layers."""
Schedule = float | tuple[tuple[float, float], ...]
"""A constant, or points (epoch, value) joined by straight lines and held flat at both ends."""


def from_plain(values: Any, cls: type[T]) -> T:
    """Builds a dataclass from nested plain values; rejects unknown keys and wrong types."""
    _check_keys(cls, values, prefix="")
    try:
        return _CONVERTER.structure(values, cls)
    except cattrs.BaseValidationError as error:
        problem = cattrs.transform_error(error, path="", format_exception=_describe)[0]
        message, _, path = problem.rpartition(" @ ")
        key = path.lstrip(".")
        raise UserError(f"config key {key}: {message}" if key else message) from error


def to_plain(value: Any) -> dict[str, Any]:
    """A dataclass as nested plain values; fields that are `None` are left out."""
    return _without_none(_CONVERTER.unstructure(value))


def value_at(schedule: Schedule, epoch: float) -> float:
    """The value of a schedule at a (fractional) epoch."""
    if isinstance(schedule, int | float):
        return float(schedule)
    left = schedule[0]
    if epoch <= left[0]:
        return left[1]
    for right in schedule[1:]:
        if epoch <= right[0]:
            share = (epoch - left[0]) / (right[0] - left[0])
            return left[1] + share * (right[1] - left[1])
        left = right
    return left[1]


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def _check_keys(cls: type, values: Any, prefix: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(values, Mapping):
        where = f"config key {prefix.rstrip('.')}" if prefix else "the configuration"
        raise UserError(f"{where} must be a table, not {values!r}")
    for key, value in values.items():
        if key not in fields:
            raise UserError(f"unknown config key {prefix}{key}{suggest(key, fields, prefix)}")
        kind = fields[key].type
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            _check_keys(kind, value, f"{prefix}{key}.")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value


def _describe(error: BaseException, _kind: Any) -> str:
    if isinstance(error, KeyError):
        return "it is missing"
    return str(error) if isinstance(error, UserError) else f"invalid value ({error})"


def _strict(kind: type, accepted: tuple[type, ...]) -> Any:
    def structure(value: Any, _type: Any) -> Any:
        is_bool_by_mistake = isinstance(value, bool) and kind is not bool
        if not isinstance(value, accepted) or is_bool_by_mistake:
            raise UserError(f"expected {kind.__name__}, got {value!r}")
        return kind(value)

    return structure


def _structure_literal(value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if value not in choices:
        raise UserError(f"expected one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def _structure_widths(value: Any, _type: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not all(type(v) is int and v >= 0 for v in value):
        raise UserError(f"expected a name or a list of whole numbers, got {value!r}")
    return tuple(value)


def _structure_paths(value: Any, _type: Any) -> Any:
    if isinstance(value, str) and not value.startswith("["):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise UserError(f"expected a path, or a list of paths in quotes, got {value!r}")
    if not value:
        raise UserError("expected at least one path, got an empty list")
    return tuple(value)


def _structure_gates(value: Any, _type: Any) -> Any:
    if value in ("inner", "all", "none"):
        return value
    if isinstance(value, str) or not value or not all(isinstance(v, str) for v in value):
        raise UserError(f"expected one of inner, all, none, or a list of layers, got {value!r}")
    return tuple(value)


def _structure_schedule(value: Any, _type: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        points = tuple((float(epoch), float(level)) for epoch, level in value)
    except (TypeError, ValueError, OverflowError):
        points = ()
    finite = all(map(math.isfinite, itertools.chain(*points)))
    if not points or not finite or any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
        raise UserError(
            f"expected a number or points [[epoch, value], ...] of rising epochs, got {value!r}"
        )
    return points


def _structure_tuple(value: Any, kind: Any) -> Any:
    args = get_args(kind)
    many = args[-1] is Ellipsis
    if not isinstance(value, list | tuple) or not (many or len(value) == len(args)):
        raise UserError(f"expected a list{'' if many else f' of {len(args)}'}, got {value!r}")
    kinds = [args[0]] * len(value) if many else list(args)
    return tuple(_CONVERTER.structure(v, k) for v, k in zip(value, kinds, strict=True))


def _structure_list(value: Any, kind: Any) -> Any:
    if not isinstance(value, list):  # a text is no list of letters
        raise UserError(f"expected a list, got {value!r}")
    return [_CONVERTER.structure(v, get_args(kind)[0]) for v in value]


def _register_optional(converter: cattrs.Converter, kind: Any, hook: Any) -> None:
    converter.register_structure_hook_func(
        lambda t: t == kind | None,
        lambda value, t: None if value is None else hook(value, t),
    )


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    for kind, accepted in {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.items():
        converter.register_structure_hook(kind, _strict(kind, accepted))
    converter.register_structure_hook_func(lambda t: get_origin(t) is tuple, _structure_tuple)
    converter.register_structure_hook_func(lambda t: get_origin(t) is list, _structure_list)
    converter.register_structure_hook_func(lambda t: get_origin(t) is Literal, _structure_literal)
    converter.register_structure_hook_func(lambda t: t == Schedule, _structure_schedule)
    converter.register_structure_hook_func(lambda t: t == Gates, _structure_gates)
    _register_optional(converter, Widths, _structure_widths)
    _register_optional(converter, Paths, _structure_paths)
    return converter


_CONVERTER = _make_converter()
