"""The command line: `deepmoe VERB`. Verbs import what they need, so that --help stays quick."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deepmoe.training import EvalResult


class OneSentence(click.ClickException):
    """A user's mistake: one sentence on stderr, exit code 2."""

    exit_code = 2


class Verbs(click.Group):
    """Turns UserError into one clear sentence; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise OneSentence(str(error)) from error


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deepmoe")
def main() -> None:
    """Convolutional networks that decide per image which channels to run."""


set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a configuration key, such as train.lr=0.05. Can be given many times.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
out_option = click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the run. [default: runs/PRESET]"
)


@main.command()
@click.argument("preset")
@set_option
@out_option
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint, if there is one.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is in the folder already.")
def train(
    preset: str, overrides: tuple[str, ...], out: Path | None, resume: bool, overwrite: bool
) -> None:
    """Train a model as PRESET says: the name of a preset, or a .toml file."""
    from deepmoe.config import load_config
    from deepmoe.training import fit

    if resume and overwrite:
        raise UserError("--resume and --overwrite contradict each other")
    config = load_config(preset, overrides)
    result = fit(config, out or _default_out(preset), resume=resume, overwrite=overwrite)
    _print_evaluation(result.evaluation)
    click.echo(f"checkpoint: {result.checkpoint}")


@main.command("eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@set_option
@json_option
def evaluate_checkpoint(checkpoint: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Evaluate CHECKPOINT on the data it was trained for, or on what --set data... names."""
    from deepmoe.config import apply_overrides
    from deepmoe.data import BatchLoader, load_data
    from deepmoe.training import evaluate, load_checkpoint

    loaded = load_checkpoint(checkpoint)
    config = apply_overrides(loaded.config, overrides)
    data = load_data(config.data)
    if data.info.classes != loaded.info.classes:
        raise UserError(
            f"{checkpoint} knows {loaded.info.classes} classes, "
            f"but the data ({config.data.name}) has {data.info.classes}"
        )
    result = evaluate(loaded.model, BatchLoader(data.evaluation, loaded.info, 500))
    if as_json:
        values = result.as_dict() | {"evaluated_on": data.evaluation_name}
        click.echo(json.dumps(values, indent=2))
    else:
        _print_evaluation(result)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def predict(checkpoint: Path, images: tuple[Path, ...], as_json: bool) -> None:
    """Classify IMAGES with CHECKPOINT, and tell what each one cost."""
    from deepmoe.costs import format_macs
    from deepmoe.training import load_checkpoint
    from deepmoe.training import predict as predict_images

    predictions = predict_images(load_checkpoint(checkpoint), images)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(p) for p in predictions], indent=2))
        return
    rows = [
        (p.image, p.label, f"{p.probability:.1%}", format_macs(p.macs), f"{p.active:.1%}")
        for p in predictions
    ]
    _print_table(("image", "class", "probability", "MACs", "active channels"), rows)


@main.command()
@click.argument("model")
@click.option("--wide", type=float, default=1.0, help="Factor on the gated widths.")
@click.option("--block", help="Residual block: basic, bottleneck-a or bottleneck-b.")
@click.option("--widths", help="Widths by name (w13-all) or as a list (64,64,128,...).")
@click.option("--classes", type=int, help="Number of classes. [default: the model's usual]")
@click.option("--input", "size", metavar="PX", help="Pixels a side, or HEIGHTxWIDTH.")
@json_option
def macs(
    model: str,
    wide: float,
    block: str | None,
    widths: str | None,
    classes: int | None,
    size: str | None,
    as_json: bool,
) -> None:
    """Count parameters and MACs of MODEL, ungated, at an input size."""
    import torch

    from deepmoe.costs import count_costs
    from deepmoe.registry import create_model, model_entry

    entry = model_entry(model)
    height, width = _parse_size(size) if size else entry.input_size
    if not wide > 0:
        raise UserError(f"--wide must be above 0, not {wide}")
    chosen: dict[str, Any] = {
        "wide": wide if wide != 1 else None,
        "block": block,
        "widths": _parse_widths(widths),
    }
    options = {key: value for key, value in chosen.items() if value is not None}
    with torch.device("meta"):  # shapes are enough to count
        network = create_model(model, classes=classes, **options)
    costs = dataclasses.asdict(count_costs(network, (height, width)))
    values = {
        "model": model,
        "input": height if height == width else [height, width],
        "classes": classes or entry.classes,
        **costs,
    }
    if as_json:
        click.echo(json.dumps(values, indent=2))
    else:
        rows = [(key, f"{v:,}" if isinstance(v, int) else str(v)) for key, v in values.items()]
        _print_table(("", ""), rows)


@main.command()
@json_option
def models(as_json: bool) -> None:
    """List the models, with their usual input and their counts."""
    import torch

    from deepmoe.costs import count_costs, format_macs
    from deepmoe.registry import create_model, list_models, model_entry

    listed = []
    for name in list_models():
        entry = model_entry(name)
        with torch.device("meta"):
            network = create_model(name)
        listed.append(
            {
                "model": name,
                "input": "x".join(map(str, entry.input_size)),
                "classes": entry.classes,
                "gates": len(network.backbone.gate_widths),
                **dataclasses.asdict(count_costs(network, entry.input_size)),
                "options": entry.options,
            }
        )
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    rows = [
        (
            m["model"],
            m["input"],
            str(m["classes"]),
            str(m["gates"]),
            f"{m['params'] / 1e6:.2f} M",
            format_macs(m["macs"]),
            f"{m['embedding_macs'] / m['macs']:.1%}",
        )
        for m in listed
    ]
    _print_table(("model", "input", "classes", "gates", "params", "MACs", "embedding"), rows)


@main.command()
@click.argument("preset", required=False)
@set_option
def config(preset: str | None, overrides: tuple[str, ...]) -> None:
    """Print PRESET resolved, as TOML; without a name, list the presets."""
    from deepmoe.config import config_to_toml, load_config, preset_names

    if preset is None:
        click.echo("\n".join(preset_names()))
    else:
        click.echo(config_to_toml(load_config(preset, overrides)), nl=False)


@main.command()
@set_option
@out_option
@click.option("--resume", is_flag=True, help="Go on from the last checkpoints.")
def quickstart(overrides: tuple[str, ...], out: Path | None, resume: bool) -> None:
    """Train a small DeepMoE and its dense twin on built-in data, and write a report."""
    from deepmoe.analysis.report import TABLE_HEADER
    from deepmoe.config import load_config
    from deepmoe.quickstart import REPORT_NAME, train_with_twin

    folder = out or _default_out("quickstart")
    contenders = train_with_twin(load_config("quickstart", overrides), folder, resume=resume)
    _print_table(TABLE_HEADER, [contender.row for contender in contenders])
    click.echo(f"report: {folder / REPORT_NAME}")


def _default_out(preset: str) -> Path:
    return Path("runs") / Path(preset).stem


def _parse_widths(text: str | None) -> "str | list[int] | None":
    if text is None or not text[:1].isdigit():
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--widths takes a name or whole numbers with commas, not {text!r}"
        ) from None


def _parse_size(text: str) -> tuple[int, int]:
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"--input takes pixels, such as 224 or 1024x2048, not {text!r}")
    return sides[0], sides[-1]


def _print_evaluation(result: "EvalResult") -> None:
    from deepmoe.costs import format_macs

    rows = [
        ("images", f"{result.images:,}"),
        ("accuracy", f"{result.accuracy:.2%}"),
        ("mean MACs", f"{format_macs(result.macs)} ({result.macs_share:.1%} of dense)"),
        ("active channels", f"{result.active:.1%}"),
    ]
    _print_table(("", ""), rows)


def _print_table(header: "Sequence[str]", rows: "Iterable[Sequence[str]]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=any(header), pad_edge=False, padding=(0, 1))
    for i, title in enumerate(header):
        table.add_column(title, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    # A log has no edge to keep to.
    console.print(table, highlight=False, width=None if console.is_terminal else 200)
