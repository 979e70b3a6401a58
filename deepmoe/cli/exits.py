"""The verb that gives a model exits."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepmoe.cli.checkpoints import Opened, open_checkpoint
from deepmoe.cli.common import data_option, json_option, network_option, next_command
from deepmoe.cli.examples import example
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.evaluation import ExitFigures

ONE_SET = ("digits", "cifar10", "cifar100")  # the same images, wherever they lie


@click.command(
    **example("deepmoe exits runs/mine/last.safetensors --loss 0.5 --out exits.safetensors")
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--loss", type=float, help="Percentage points of accuracy that may be lost, such as 0.5."
)
@click.option(
    "--macs", "share", type=float, help="Or the share of the dense MACs to keep, such as 0.3."
)
@click.option(
    "--guarantee",
    type=float,
    help="With --loss: certify with this probability that no more is lost on new images.",
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The checkpoint file to write."
)
@data_option
@network_option
@json_option
def exits(
    checkpoint: Path,
    loss: float | None,
    share: float | None,
    guarantee: float | None,
    out: Path,
    overrides: tuple[str, ...],
    network: str | None,
    as_json: bool,
) -> None:
    """Add early exits to CHECKPOINT.

    Its embedding (or a narrow network in its place) answers the images that it is confident of;
    these never reach the base network. The confidence threshold is fitted on held-out training
    images: train with data.holdout, such as 2000. Then: deepmoe eval OUT --set data.holdout=0
    """
    from deepmoe.checkpoint import save_checkpoint
    from deepmoe.evaluation import set_exits
    from deepmoe.evaluation.exits import check_asked
    from deepmoe.files import check_writable

    check_asked(loss, share, guarantee)
    if out.exists():
        raise UserError(f"{out} already exists: choose another --out")
    check_writable(out)
    opened = open_checkpoint(checkpoint, overrides, network)
    loaded, data = opened.checkpoint, opened.data
    _check_fit(opened, overrides)
    with opened.autocast():
        figures = set_exits(
            loaded.model, data.evaluation, loss=loss, macs=share, guarantee=guarantee
        )
    named = dataclasses.replace(loaded.config.model, exits=True)
    config = dataclasses.replace(loaded.config, model=named)
    save_checkpoint(out, loaded.model, config, loaded.info, loaded.state)
    if as_json:
        values = figures.as_dict() | {"guarantee": guarantee, "fitted_on": data.evaluation_name}
        say(json.dumps(values, indent=2))
        return
    _print(figures, data.evaluation_name, loss, guarantee)
    say(f"checkpoint: {out}")
    next_command("deepmoe eval", out, network, "--set data.holdout=0")  # on the test set


def _check_fit(opened: Opened, overrides: tuple[str, ...]) -> None:
    """Refuses models that can't have exits, and images that can't be used to find them."""
    from deepmoe.config import apply_overrides
    from deepmoe.hard_moe import refuse_experts

    refuse_experts(opened.checkpoint.model, "it can't have exits")
    config, info = opened.checkpoint.config, opened.checkpoint.info
    if info.task != "classification":
        raise UserError("segmentation has no exits: an embedding answers for a whole image")
    mu = config.loss.embedding
    levels = [level for _, level in mu] if isinstance(mu, tuple) else [mu]
    if not any(levels):
        raise UserError(
            "the embedding was never trained to classify (loss.embedding = 0), so it can't answer: "
            "train the model with loss.embedding above 0"
        )
    asked = apply_overrides(config, overrides).data
    # A folder that was named once more is no other one: its test set is the same.
    elsewhere = Path(asked.root).resolve() != Path(config.data.root).resolve()
    named = asked.name not in ONE_SET and (elsewhere or asked.name != config.data.name)
    if opened.data.evaluation_name != "holdout" and not named:
        raise UserError(
            "exits are fitted on images that the model was not trained on, and not on the test "
            "set: train it with data.holdout, such as 2000, or give others with --set data.root"
        )


def _print(figures: "ExitFigures", on: str, loss: float | None, guarantee: float | None) -> None:
    from deepmoe.costs import format_macs

    rows = []
    for name, accuracy, macs, exited in (
        ("without exits", figures.accuracy_without, figures.macs_without, 0.0),
        ("with exits", figures.accuracy, figures.macs, figures.exited),
    ):
        dense = f"{macs / figures.dense_macs:.1%}"
        rows.append((name, f"{accuracy:.2%}", format_macs(macs), dense, f"{exited:.1%}"))
    header = ("", "accuracy", "mean MACs", "of dense MACs", "exit rate")
    print_table(header, rows)
    say(
        f"fitted on {figures.images:,} images ({on}): the embedding answers from a confidence of "
        f"{figures.threshold:.3f}, and has a vote of {figures.vote:.0%} on the other images"
    )
    if guarantee is None:
        change = 0 - 100 * figures.loss  # no -0.00
        say(
            f"on other images like these, expect {change:+.2f} points of accuracy, give or take "
            f"{100 * figures.loss_error:.2f} (one standard error); --guarantee bounds the loss"
        )
    else:
        say(
            f"certified: with probability {guarantee:g}, accuracy falls by at most {loss:g} points "
            f"on images like these ({figures.spoilt} of them are answered wrongly by exits alone)"
        )
