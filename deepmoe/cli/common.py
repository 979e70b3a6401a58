"""What several verbs share: options, parsers of values, tables."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.console import say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_SIDE = 100_000  # pixels, as of data.size

set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a configuration key, such as train.lr=0.05. Can be repeated.",
)
data_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override data.*, train.device or train.precision, such as data.root=PATH. "
    "Can be repeated.",
)
network_option = click.option(
    "--network",
    metavar="NAME",
    help="The base network, if it is not from the zoo: timm:NAME, package.module:factory, ...",
)
sparse_option = click.option(
    "--sparse", is_flag=True, help="Run in the sparse engine, which skips closed channels."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _replaceable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Refuses a file that is not one of results, before anything is measured."""
    if path is not None:
        from deepmoe.files import check_replaceable
        from deepmoe.results import START

        check_replaceable(path, START)
    return path


save_option = click.option(
    "--save",
    type=click.Path(path_type=Path),
    callback=_replaceable,
    help="Also write the results to a JSON file, with command, hardware and versions.",
)


def as_typed(overrides: "Iterable[str]") -> str:
    """Settings as they would be typed, but for the place of the data, which differs elsewhere."""
    return "".join(f" --set {item}" for item in overrides if "data.root" not in item)


def parse_widths(text: str | None) -> str | tuple[int, ...] | None:
    """Widths by name, or as numbers."""
    if text is None or "," not in text:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"--widths takes a name or whole numbers separated by commas, not {text!r}"
        ) from None


def parse_numbers(option: str, text: str, kind: type) -> list[Any]:
    """Numbers with commas between them."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"{option} takes one or more numbers, separated by commas, not {text!r}"
        ) from None


def parse_size(text: str) -> tuple[int, int]:
    """Height and width."""
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or not 1 <= min(sides) <= max(sides) <= MOST_SIDE:
        raise UserError(f"--input takes pixels, such as 224 or 1024x2048, not {text!r}")
    return sides[0], sides[-1]


def next_command(verb: str, file: Path, network: str | None, rest: str = "") -> None:
    """Ends what a verb prints: a command to type, as it must be typed."""
    made_by = f"--network {shlex.quote(network)}" if network is not None else ""
    say(" ".join(part for part in ("next:", verb, shlex.quote(str(file)), rest, made_by) if part))
