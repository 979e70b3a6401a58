"""The verbs. Each imports what it needs when it is called, so that --help stays quick."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.cli.bench import bench
from deepmoe.cli.common import (
    json_option,
    parse_numbers,
    parse_size,
    parse_widths,
    print_table,
    save_option,
    set_option,
)
from deepmoe.cli.sweep import sweep
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from deepmoe.data import DataSource
    from deepmoe.training.checkpoint import Checkpoint
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


main.add_command(bench)
main.add_command(sweep)

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


sparse_option = click.option(
    "--sparse", is_flag=True, help="Run only the channels that the gates ask for."
)


@main.command("eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@set_option
@sparse_option
@json_option
def evaluate_checkpoint(
    checkpoint: Path, overrides: tuple[str, ...], sparse: bool, as_json: bool
) -> None:
    """Evaluate CHECKPOINT on the data it was trained for, or on what --set data... names."""
    import torch

    from deepmoe.training.trainer import evaluate_on

    loaded, data, fabric = _open_for_evaluation(checkpoint, overrides)
    if sparse:
        from deepmoe.sparse import sparsify

        half = "bf16" in str(fabric._precision.precision)
        result = evaluate_on(sparsify(loaded.model, dtype=torch.bfloat16 if half else None), data)
    else:
        with fabric.autocast():
            result = evaluate_on(loaded.model, data)
    if as_json:
        values = result.as_dict() | {"evaluated_on": data.evaluation_name}
        click.echo(json.dumps(values, indent=2))
    else:
        _print_evaluation(result)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@set_option
@click.option(
    "--thresholds",
    default="0,0.25,0.5,0.75,1,1.25,1.5",
    show_default=True,
    help="In units of each layer's mean open gate; smaller gates are closed.",
)
@click.option(
    "--refit-norms", is_flag=True, help="Measure batch norms anew for each point, on training data."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the curve, as a PNG.")
@json_option
@save_option
def curve(
    checkpoint: Path,
    overrides: tuple[str, ...],
    thresholds: str,
    refit_norms: bool,
    plot: Path | None,
    as_json: bool,
    save: Path | None,
) -> None:
    """Accuracy against cost of one CHECKPOINT: closes its small gates, more and more of them."""
    from deepmoe.results import write_result
    from deepmoe.training.curve import cost_curve

    levels = parse_numbers("--thresholds", thresholds, float)
    if not all(level >= 0 for level in levels):  # nan is not, either
        raise UserError("--thresholds must not be negative")
    if plot is not None and (plot.suffix != ".png" or not plot.parent.is_dir()):
        raise UserError(f"--plot takes a .png in a folder that is there, not {plot}")
    loaded, data, fabric = _open_for_evaluation(checkpoint, overrides)
    if data.info.task != "classification":
        raise UserError("curve takes models that classify images")
    with fabric.autocast():
        refit = data.train if refit_norms else None
        points = cost_curve(loaded.model, data.evaluation, levels, refit)
    values = [{"threshold": p.threshold, **p.result.as_dict()} for p in points]
    if save is not None:
        changes = "".join(f" --set {item}" for item in overrides if "data.root" not in item)
        refitted = " --refit-norms" * refit_norms
        command = f"deepmoe curve {checkpoint.name} --thresholds {thresholds}{refitted}{changes}"
        write_result(save, values, command=command, seed=0, device=fabric.device)
    if plot is not None:
        from deepmoe.analysis.plots import cost_curve_plot

        cost_curve_plot({checkpoint.stem: values}).savefig(plot)
    if as_json:
        click.echo(json.dumps(values, indent=2))
        return
    rows = []
    for p in points:
        cost = f"{p.result.macs:.4g}", f"{p.result.macs_share:.3f}"
        rows.append((f"{p.threshold:g}", *cost, f"{100 * p.result.accuracy:.2f} %"))
    print_table(("threshold", "MACs", "of dense", "accuracy"), rows)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--macs", "share", type=float, required=True, help="Share of the dense MACs to come down to."
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The new checkpoint, a file."
)
@set_option
@json_option
def cut(
    checkpoint: Path, share: float, out: Path, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Make a cheaper model of CHECKPOINT: closes its small gates, measures its norms anew."""
    from deepmoe.training.checkpoint import save_checkpoint
    from deepmoe.training.curve import cut_to
    from deepmoe.training.evaluate import evaluate

    if out.is_dir() or out.resolve() == checkpoint.resolve():
        raise UserError(f"--out takes a file besides the checkpoint, not {out}")
    loaded, data, fabric = _open_for_evaluation(checkpoint, overrides)
    if data.info.task != "classification":
        raise UserError("cut takes models that classify images")
    with fabric.autocast():
        size, images = data.info.size, data.calibration
        small, threshold = cut_to(loaded.model, size, share, images, data.train)
        result = evaluate(small, data.evaluation)
    save_checkpoint(out, small, loaded.config, loaded.info, loaded.state)
    if as_json:
        values = {"threshold": threshold, **result.as_dict()}
        click.echo(json.dumps(values | {"evaluated_on": data.evaluation_name}, indent=2))
        return
    _print_evaluation(result)
    click.echo(f"checkpoint: {out}")


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@sparse_option
@json_option
def predict(checkpoint: Path, images: tuple[Path, ...], sparse: bool, as_json: bool) -> None:
    """Classify IMAGES with CHECKPOINT, and tell what each one cost."""
    from deepmoe.costs import format_macs
    from deepmoe.training import load_checkpoint
    from deepmoe.training import predict as predict_images

    loaded = load_checkpoint(checkpoint)
    if sparse:
        from deepmoe.sparse import sparsify

        loaded = dataclasses.replace(loaded, model=sparsify(loaded.model))
    predictions = predict_images(loaded, images)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(p) for p in predictions], indent=2))
        return
    rows = [
        (p.image, p.label, f"{p.probability:.1%}", format_macs(p.macs), f"{p.active:.1%}")
        for p in predictions
    ]
    print_table(("image", "class", "probability", "MACs", "active channels"), rows)


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
    height, width = entry.input_size if size is None else parse_size(size)
    chosen = ModelConfig(model, wide=wide, block=block, widths=parse_widths(widths))  # type: ignore[arg-type]
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
        print_table(("", ""), rows)


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
    print_table(("model", "input", "classes", "gates", "params", "MACs", "embedding"), rows)


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
    print_table(TABLE_HEADER, [contender.row for contender in contenders])
    click.echo(f"report: {folder / REPORT_NAME}")


def _default_out(preset: str) -> Path:
    return Path("runs") / Path(preset).stem


def _print_evaluation(result: "Result") -> None:
    from deepmoe.costs import format_macs

    rows = [
        ("images", f"{result.images:,}"),
        (result.measure, f"{result.accuracy:.2%}"),
        ("mean MACs", f"{format_macs(result.macs)} ({result.macs_share:.1%} of dense)"),
        ("active channels", f"{result.active:.1%}"),
    ]
    print_table(("", ""), rows)


def _open_for_evaluation(
    checkpoint: Path, overrides: tuple[str, ...]
) -> "tuple[Checkpoint, DataSource, Fabric]":
    """A checkpoint, its model on the device to use, and the data to evaluate it on."""
    from deepmoe.config import apply_overrides
    from deepmoe.data import open_data
    from deepmoe.training import load_checkpoint
    from deepmoe.training.distributed import make_fabric

    for item in overrides:
        if not item.startswith(("data.", "train.device", "train.precision")):
            raise UserError(
                f"only data..., train.device and train.precision can be --set here, not {item}"
            )
    loaded = load_checkpoint(checkpoint)
    config = apply_overrides(loaded.config, overrides)
    fabric = make_fabric(config.train)
    batch_size = config.train.batch_size
    data = open_data(config.data, batch_size=batch_size, device=fabric.device, info=loaded.info)
    loaded.model.to(fabric.device)
    return loaded, data, fabric
