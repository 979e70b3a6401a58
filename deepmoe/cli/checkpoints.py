"""The verbs that take a checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepmoe.cli.common import (
    as_typed,
    json_option,
    parse_numbers,
    print_evaluation,
    print_table,
    save_option,
    set_option,
)
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from deepmoe.data import DataSource
    from deepmoe.training.checkpoint import Checkpoint

sparse_option = click.option(
    "--sparse", is_flag=True, help="Run only the channels that the gates ask for."
)


@click.command("eval")
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
        print_evaluation(result)


@click.command()
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
        changes = as_typed(overrides)
        refitted = " --refit-norms" * refit_norms
        command = f"deepmoe curve {checkpoint.name} --thresholds {thresholds}{refitted}{changes}"
        write_result(
            save, values, command=command, seed=loaded.config.train.seed, device=fabric.device
        )
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


@click.command()
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
    print_evaluation(result)
    click.echo(f"checkpoint: {out}")


@click.command()
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
