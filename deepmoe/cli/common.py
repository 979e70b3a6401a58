"""What several verbs share: options, parsers of values, tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.console import print_table
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deepmoe.evaluation import Evaluation, SegmentationEvaluation

set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a configuration key, such as train.lr=0.05. Can be given many times.",
)
data_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change what it runs on, such as data.root=PATH: data.*, train.device, train.precision.",
)
network_option = click.option(
    "--network",
    metavar="NAME",
    help="What makes the base network, where it is not of the zoo: timm:NAME, package:factory, ...",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
save_option = click.option(
    "--save",
    type=click.Path(path_type=Path),
    help="Also write the results as JSON, with command, hardware and versions.",
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
            f"--widths takes a name or whole numbers with commas, not {text!r}"
        ) from None


def parse_numbers(option: str, text: str, kind: type) -> list[Any]:
    """Numbers with commas between them."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} takes a number, or several with commas, not {text!r}") from None


def parse_size(text: str) -> tuple[int, int]:
    """Height and width."""
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"--input takes pixels, such as 224 or 1024x2048, not {text!r}")
    return sides[0], sides[-1]


def print_evaluation(result: "Evaluation | SegmentationEvaluation", evaluated_on: str) -> None:
    """Prints how good a model is, on which images, and what it costs."""
    from deepmoe.costs import format_macs
    from deepmoe.evaluation import Evaluation

    rows = [
        ("images", f"{result.images:,} ({evaluated_on})"),
        (result.measure, f"{result.accuracy:.2%}"),
        ("mean MACs", f"{format_macs(result.macs)} ({result.macs_share:.1%} of dense)"),
        ("active channels", f"{result.active:.1%}"),
    ]
    if isinstance(result, Evaluation) and result.exited is not None:
        rows.append(("exit rate", f"{result.exited:.1%}"))
    print_table(("", ""), rows)
