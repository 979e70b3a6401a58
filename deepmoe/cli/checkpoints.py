"""The verbs that take a checkpoint."""

import io
import json
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from deepmoe.cli.common import (
    as_typed,
    data_option,
    json_option,
    network_option,
    next_command,
    parse_numbers,
    save_option,
    sparse_option,
)
from deepmoe.cli.examples import example
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    import torch

    from deepmoe.checkpoint import Checkpoint
    from deepmoe.config import DataConfig, RunConfig
    from deepmoe.data import DataSource
    from deepmoe.evaluation.curve import By

MOST_SHARE = 2.0  # embedding and gates may cost as much as a small network


@click.command("eval", **example("deepmoe eval runs/quickstart/deepmoe/last.safetensors"))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@data_option
@network_option
@sparse_option
@json_option
def evaluate_checkpoint(
    checkpoint: Path,
    overrides: tuple[str, ...],
    network: str | None,
    sparse: bool,
    as_json: bool,
) -> None:
    """Evaluate CHECKPOINT: accuracy, MACs, active channels.

    On its own data, or on the data that --set data... names.
    """
    import torch

    from deepmoe.evaluation import evaluate_on

    opened = open_checkpoint(checkpoint, overrides, network)
    model, data = opened.checkpoint.model, opened.data
    if sparse:
        from deepmoe.sparse import sparsify

        half = opened.precision == "bf16-mixed"
        model = sparsify(model, dtype=torch.bfloat16 if half else None)
        result = evaluate_on(model, data.info, data.evaluation, data.evaluation_name)
    else:
        with opened.autocast():
            result = evaluate_on(model, data.info, data.evaluation, data.evaluation_name)
    if as_json:
        say(json.dumps(result.as_dict(), indent=2))
        return
    say(result)
    if model.exit_at is not None:
        next_command("deepmoe bench exits", checkpoint, network)
    elif model.gated:
        next_command("deepmoe bench sparse", checkpoint, network)
    else:
        next_command("deepmoe predict", checkpoint, network, "IMAGES")


@click.command(**example("deepmoe curve runs/quickstart/deepmoe/last.safetensors --plot curve.png"))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@data_option
@network_option
@click.option(
    "--by",
    type=click.Choice(["gates", "exits"]),
    help="gates: close small gates. exits: let the embedding answer images it is confident of. "
    "[default: exits if the model has exits, or no gates to close; otherwise gates]",
)
@click.option(
    "--thresholds",
    help="Thresholds to try, with commas. Gates: those below the threshold are closed, in units of "
    "each layer's mean open gate. Exits: the confidence the embedding needs to answer; above 1, "
    "it never does. "
    "[default: 0,0.25,0.5,0.75,1,1.25,1.5 and 1.01,0.95,0.9,0.8,0.7,0.6,0.5,0.4,0.3]",
)
@click.option(
    "--refit-norms", is_flag=True, help="Refit batch norm on training data for each point."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the curve, as a PNG.")
@json_option
@save_option
def curve(
    checkpoint: Path,
    overrides: tuple[str, ...],
    network: str | None,
    by: "By | None",
    thresholds: str | None,
    refit_norms: bool,
    plot: Path | None,
    as_json: bool,
    save: Path | None,
) -> None:
    """Show accuracy against MACs for CHECKPOINT, without training.

    Closes more and more of its small gates, or lets its embedding answer more and more images.
    """
    from deepmoe.costs import format_macs
    from deepmoe.evaluation import cost_curve
    from deepmoe.files import write_atomically
    from deepmoe.results import write_result

    levels = None if thresholds is None else parse_numbers("--thresholds", thresholds, float)
    if levels is not None and not all(0 <= level < math.inf for level in levels):  # nan fails, too
        raise UserError("--thresholds must be finite, and not negative")
    if plot is not None and (plot.suffix != ".png" or not plot.parent.is_dir()):
        raise UserError(f"--plot takes a .png file in an existing folder, not {plot}")
    opened = open_checkpoint(checkpoint, overrides, network)
    loaded, data = opened.checkpoint, opened.data
    if data.info.task != "classification":
        raise UserError("curve takes models that classify images")
    with opened.autocast():
        refit = data.train if refit_norms else None
        points = cost_curve(loaded.model, data.evaluation, levels, refit, by=by)
    on = {"evaluated_on": data.evaluation_name}
    values = [{"threshold": p.threshold, **p.result.as_dict(), **on} for p in points]
    if save is not None:
        changes = as_typed(overrides)
        tried = thresholds or ",".join(f"{p.threshold:g}" for p in points)
        way = f" --by {by}" if by else ""
        options = f"{way} --thresholds {tried}{' --refit-norms' * refit_norms}"
        command = f"deepmoe curve {checkpoint.name}{options}{changes}"
        seed = loaded.config.train.seed
        write_result(save, values, command=command, seed=seed, device=opened.device)
    if plot is not None:
        from deepmoe.analysis.plots import cost_curve_plot

        drawn = io.BytesIO()
        cost_curve_plot({checkpoint.stem: values}).savefig(drawn, format="png")
        write_atomically(plot, drawn.getvalue())
    if as_json:
        say(json.dumps(values, indent=2))
        return
    rows = []
    exits = any(p.result.exited is not None for p in points)
    for p in points:
        cost = format_macs(p.result.macs), f"{p.result.macs_share:.1%}"
        answered = (f"{p.result.exited:.1%}",) if exits else ()
        shown = "never" if exits and p.threshold > 1 else f"{p.threshold:g}"
        rows.append((shown, *answered, *cost, f"{p.result.accuracy:.2%}"))
    answered = ("exit rate",) if exits else ()
    title = "exit from a confidence of" if exits else "threshold"
    print_table((title, *answered, "MACs", "of dense", "accuracy"), rows)
    say(f"{points[0].result.images:,} images ({data.evaluation_name})")
    verb = "deepmoe exits" if exits else "deepmoe cut"
    next_command(verb, checkpoint, network, "--macs SHARE --out FILE")


@click.command(
    **example(
        "deepmoe cut runs/quickstart/deepmoe/last.safetensors --macs 0.4 --out small.safetensors"
    )
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--macs",
    "share",
    type=float,
    required=True,
    help="Share of the dense MACs to keep, such as 0.4.",
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The checkpoint file to write."
)
@data_option
@network_option
@json_option
def cut(
    checkpoint: Path,
    share: float,
    out: Path,
    overrides: tuple[str, ...],
    network: str | None,
    as_json: bool,
) -> None:
    """Make CHECKPOINT cheaper, without training.

    Closes its least important channels for all images, and refits batch norm.
    """
    from deepmoe.checkpoint import save_checkpoint
    from deepmoe.evaluation import cut_to, evaluate_on
    from deepmoe.files import check_writable

    if out.exists():
        raise UserError(f"{out} already exists: choose another --out")
    check_writable(out)
    if not 0 < share <= MOST_SHARE:
        raise UserError(f"--macs is a share of the dense MACs, such as 0.4, not {share:g}")
    opened = open_checkpoint(checkpoint, overrides, network)
    loaded, data = opened.checkpoint, opened.data
    if data.info.task != "classification":
        raise UserError("cut takes models that classify images")
    with opened.autocast():
        small = cut_to(loaded.model, data.info.size, share, data.calibration, data.train)
        result = evaluate_on(small, data.info, data.evaluation, data.evaluation_name)
    save_checkpoint(out, small, loaded.config, loaded.info, loaded.state)
    if as_json:
        say(json.dumps(result.as_dict(), indent=2))
        return
    say(result)
    say(f"checkpoint: {out}")
    next_command("deepmoe bench sparse", out, network)


class Opened(NamedTuple):
    """A checkpoint, its model on the device to use, and the data to evaluate it on."""

    checkpoint: "Checkpoint"
    data: "DataSource"
    device: "torch.device"
    precision: str
    data_config: "DataConfig"

    def autocast(self) -> AbstractContextManager[Any]:
        """What the model runs under."""
        from deepmoe.devices import autocast

        return autocast(self.device, self.precision)


def open_checkpoint(checkpoint: Path, overrides: tuple[str, ...], network: str | None) -> Opened:
    """Reads a checkpoint, and opens its data, or what overrides name instead."""
    from deepmoe.checkpoint import load_checkpoint
    from deepmoe.data import open_data
    from deepmoe.devices import choose_device, choose_precision

    check_overrides(overrides)
    loaded = load_checkpoint(checkpoint, network=network)
    config = changed_data(loaded.config, overrides)
    device = choose_device(config.train.device)
    batch_size = config.train.batch_size
    data = open_data(config.data, batch_size=batch_size, device=device, info=loaded.info)
    loaded.model.to(device)
    precision = choose_precision(config.train.precision, device)
    return Opened(loaded, data, device, precision, config.data)


def check_overrides(overrides: tuple[str, ...]) -> None:
    """Refuses changes of what a model was trained with."""
    for item in overrides:
        if not item.startswith(("data.", "train.device", "train.precision")):
            raise UserError(
                f"--set can change only data.*, train.device and train.precision here, not {item}"
            )


def changed_data(trained: "RunConfig", overrides: tuple[str, ...]) -> "RunConfig":
    """A model's configuration with what overrides name as its data."""
    from deepmoe.config import apply_overrides

    check_overrides(overrides)
    config = apply_overrides(trained, overrides)
    trained_on, asked = trained.data, config.data
    if asked.holdout not in (0, trained_on.holdout) and asked.name == trained_on.name:
        raise UserError(
            f"the model was trained with data.holdout={trained_on.holdout}, so it has seen some of "
            f"the images that data.holdout={asked.holdout} holds out"
        )
    return config
