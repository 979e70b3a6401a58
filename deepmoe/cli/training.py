"""The verbs that train."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.cli.common import as_typed, data_option, next_command, set_option
from deepmoe.cli.examples import example
from deepmoe.console import complain, print_table, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.config import RunConfig


def out_option(name: str) -> Callable[[Any], Any]:
    """Where a verb leaves its run."""
    help_text = f"Folder for the run. [default: runs/{name}]"
    return click.option("--out", type=click.Path(path_type=Path), help=help_text)


@click.command(**example("deepmoe train quickstart --out runs/first"))
@click.argument("preset")
@set_option
@out_option("PRESET")
@click.option("--resume", is_flag=True, help="Resume from the last checkpoint, if there is one.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is already in the folder.")
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
    """Train a model from PRESET, a name or a .toml file.

    "deepmoe config" lists the names.
    """
    from deepmoe.config import load_config
    from deepmoe.sources import is_source
    from deepmoe.training import fit

    _check_choice(resume, overwrite)
    config = load_config(preset, overrides)
    _warn_of_batch_size(preset, config, overrides)
    result = fit(
        config,
        out or _default_out(preset),
        resume=resume,
        overwrite=overwrite,
        devices=devices,
        nodes=nodes,
    )
    say(result.evaluation)
    say(f"checkpoint: {result.checkpoint}")
    network = config.model.name if is_source(config.model.name) else None
    if config.model.exits and result.data.evaluation_name == "holdout":
        next_command("deepmoe exits", result.checkpoint, network, "--loss 0.5 --out FILE")
    elif result.model.gated and not result.model.on_the_way:
        next_command("deepmoe bench sparse", result.checkpoint, network)
    else:
        next_command("deepmoe predict", result.checkpoint, network, "IMAGES")


@click.command(**example("deepmoe teach runs/a/last.safetensors --out lessons.safetensors"))
@click.argument("checkpoints", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--views", default=30, show_default=True, help="Random crops and flips of each image."
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The file to write, for train.teacher.",
)
@data_option
@click.option(
    "--network",
    "networks",
    metavar="NAME",
    multiple=True,
    help="A base network that is not from the zoo: timm:NAME, package.module:factory, ... "
    "Can be repeated.",
)
def teach(
    checkpoints: tuple[Path, ...],
    views: int,
    out: Path,
    overrides: tuple[str, ...],
    networks: tuple[str, ...],
) -> None:
    """Cache teachers' outputs, for distillation in many runs.

    CHECKPOINTS are the teachers. They run once on several crops of each image. A run with
    train.teacher = OUT sees one of these crops in each epoch and learns from the teachers' outputs
    for it. Works for data held in memory: CIFAR and digits.
    """
    from deepmoe.training.lessons import teach_from

    if out.exists():
        raise UserError(f"{out} already exists: choose another --out")
    lessons = teach_from(checkpoints, views, out, overrides, networks)
    say(f"{lessons.views} views of {lessons.images:,} images; teachers: {len(checkpoints)}")
    taught = f"--set train.teacher={shlex.quote(str(out))} --set loss.distillation=0.9"
    say(f"next: deepmoe train PRESET {taught}")


@click.command(**example("deepmoe quickstart"))
@set_option
@out_option("quickstart")
@click.option("--resume", is_flag=True, help="Resume from the last checkpoints.")
@click.option("--overwrite", is_flag=True, help="Replace runs that are already in the folder.")
def quickstart(overrides: tuple[str, ...], out: Path | None, resume: bool, overwrite: bool) -> None:
    """Train a gated network and its dense twin on built-in data.

    The twin is the same network without gates. Takes about a minute, and writes a report.
    """
    from deepmoe.analysis import comparison
    from deepmoe.checkpoint import LAST_NAME
    from deepmoe.config import load_config
    from deepmoe.quickstart import REPORT_NAME, train_with_twin

    _check_choice(resume, overwrite)
    folder = out or _default_out("quickstart")
    config = load_config("quickstart", overrides)
    command = f"deepmoe quickstart{as_typed(overrides)}"
    contenders = train_with_twin(
        config, folder, resume=resume, overwrite=overwrite, command=command
    )
    print_table(*comparison(contenders))
    say(f"report: {folder / REPORT_NAME}")
    gated = folder / "deepmoe" / LAST_NAME
    say(f"in depth: deepmoe analyze {shlex.quote(str(gated))}")
    next_command("deepmoe bench sparse", gated, None)


def _check_choice(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise UserError("give --resume or --overwrite, not both")


def _warn_of_batch_size(preset: str, config: "RunConfig", overrides: tuple[str, ...]) -> None:
    """A learning rate fits a batch size: whoever changes one alone is told of the other."""
    from deepmoe.config import load_config

    usual = load_config(preset).train
    batch, rate = config.train.batch_size, config.train.lr
    if batch != usual.batch_size and not any(item.startswith("train.lr=") for item in overrides):
        fitting = rate * batch / usual.batch_size
        complain(
            f"Warning: train.lr = {rate:g} is for batches of {usual.batch_size}; "
            f"for {batch}, set train.lr={fitting:.3g}"
        )


def _default_out(preset: str) -> Path:
    return Path("runs") / Path(preset).stem
