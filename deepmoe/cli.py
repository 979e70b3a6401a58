"""The command line: `deepmoe VERB`. Verbs import what they need, so that --help stays quick."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deepmoe.training.trainer import Result


class Verbs(click.Group):
    """Turns mistakes into one clear sentence; anything else is a bug and keeps its traceback."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **{**options, "standalone_mode": False})
        except UserError as error:
            message, code = str(error), error.exit_code
        except click.ClickException as error:
            message, code = error.format_message(), error.exit_code
        except click.Abort:
            message, code = "interrupted", 130
        click.echo(f"Error: {message}", err=True)
        sys.exit(code)


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
@click.option("--devices", type=int, default=1, help="Devices on each node.", show_default=True)
@click.option("--nodes", type=int, default=1, help="Nodes, under torchrun or SLURM.")
def train(
    preset: str,
    overrides: tuple[str, ...],
    out: Path | None,
    resume: bool,
    overwrite: bool,
    devices: int,
    nodes: int,
) -> None:
    """Train a model as PRESET says: the name of a preset, or a .toml file."""
    from deepmoe.config import load_config
    from deepmoe.training import fit

    if resume and overwrite:
        raise UserError("--resume and --overwrite contradict each other")
    config = load_config(preset, overrides)
    result = fit(
        config,
        out or _default_out(preset),
        resume=resume,
        overwrite=overwrite,
        devices=devices,
        nodes=nodes,
    )
    _print_evaluation(result.evaluation)
    click.echo(f"checkpoint: {result.checkpoint}")


@main.command("eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@set_option
@json_option
def evaluate_checkpoint(checkpoint: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Evaluate CHECKPOINT on the data it was trained for, or on what --set data... names."""
    from deepmoe.config import apply_overrides
    from deepmoe.data import open_data
    from deepmoe.training import load_checkpoint
    from deepmoe.training.distributed import make_fabric
    from deepmoe.training.trainer import evaluate_on

    for item in overrides:
        if not item.startswith(("data.", "train.device", "train.precision")):
            raise UserError(
                f"eval takes --set data..., train.device or train.precision, not {item}"
            )
    loaded = load_checkpoint(checkpoint)
    config = apply_overrides(loaded.config, overrides)
    fabric = make_fabric(config.train)
    data = open_data(
        config.data,
        batch_size=config.train.batch_size,
        device=fabric.device,
        info=loaded.info,
    )
    model = loaded.model.to(fabric.device)
    with fabric.autocast():
        result = evaluate_on(model, data)
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

    from deepmoe.config import ModelConfig
    from deepmoe.costs import count_costs
    from deepmoe.registry import create_model, model_entry, model_options

    entry = model_entry(model)
    height, width = entry.input_size if size is None else _parse_size(size)
    chosen = ModelConfig(model, wide=wide, block=block, widths=_parse_widths(widths))  # type: ignore[arg-type]
    with torch.device("meta"):  # shapes are enough to count
        network = create_model(model, classes=classes, **model_options(chosen))
    costs = dataclasses.asdict(count_costs(network, (height, width)))
    values = {
        "model": model,
        "input": height if height == width else [height, width],
        "classes": network.backbone.classes,
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
    from deepmoe.costs import format_macs, zoo_costs

    listed = zoo_costs()
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


@main.group()
def bench() -> None:
    """Measure speed: ratios from one interleaved run."""


save_option = click.option(
    "--save", type=click.Path(path_type=Path), help="Also write the figures, with their origin."
)


@bench.command("train")
@click.argument("preset")
@set_option
@click.option("--rounds", type=int, default=5, help="Timed epochs of each kind.", show_default=True)
@json_option
@save_option
def bench_train_verb(
    preset: str, overrides: tuple[str, ...], rounds: int, as_json: bool, save: Path | None
) -> None:
    """Time epochs of PRESET: dense twin, joint stage and frozen stage."""
    from deepmoe.bench.train import bench_train
    from deepmoe.config import load_config

    config = load_config(preset, overrides)
    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, not {rounds}")
    values = bench_train(config, rounds)
    if save is not None:
        from deepmoe.results import write_result

        changes = "".join(f" --set '{o}'" for o in overrides if not o.startswith("data.root"))
        command = f"deepmoe bench train {preset}{changes} --rounds {rounds}"
        write_result(save, values, command=command, seed=config.train.seed, device=values["device"])
    if as_json:
        click.echo(json.dumps(values, indent=2))
        return
    ratios = {"dense": 1.0, **values["ratio_to_dense"]}
    rows = [
        (name, f"{seconds:.3f}", f"{ratios[name]:.2f}", _phases(values, name))
        for name, seconds in values["seconds_per_epoch"].items()
    ]
    _print_table(("kind", "seconds an epoch", "of dense", "ms a batch, by phase"), rows)


@bench.command("input")
@click.argument("root", required=False)
@click.option("--images", type=int, default=400, show_default=True, help="How many to decode.")
@json_option
@save_option
def bench_input_verb(root: str | None, images: int, as_json: bool, save: Path | None) -> None:
    """Time decoding of image files in ROOT (made up if not given), beside torchvision's."""
    from deepmoe.bench.input import bench_input

    if images < 1:
        raise UserError(f"--images must be at least 1, not {images}")
    values = bench_input(root, images=images)
    if save is not None:
        from deepmoe.results import write_result

        command = f"deepmoe bench input --images {images}"
        write_result(save, values, command=command, seed=0, device="cpu")
    if as_json:
        click.echo(json.dumps(values, indent=2))
    else:
        _print_table(("", ""), [(key, str(value)) for key, value in values.items()])


def _phases(values: dict[str, Any], name: str) -> str:
    times = values["milliseconds_per_batch"][name]
    return ", ".join(f"{phase} {time:.2f}" for phase, time in times.items())


def _default_out(preset: str) -> Path:
    return Path("runs") / Path(preset).stem


def _parse_widths(text: str | None) -> str | tuple[int, ...] | None:
    if text is None or "," not in text:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
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


def _print_evaluation(result: "Result") -> None:
    from deepmoe.costs import format_macs

    rows = [
        ("images", f"{result.images:,}"),
        (result.measure, f"{result.accuracy:.2%}"),
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
