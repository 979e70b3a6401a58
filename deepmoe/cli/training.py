"""The verbs that train."""

from pathlib import Path

import click

from deepmoe.cli.common import print_evaluation, print_table, set_option
from deepmoe.errors import UserError

out_option = click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the run. [default: runs/PRESET]"
)


@click.command()
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
    print_evaluation(result.evaluation)
    click.echo(f"checkpoint: {result.checkpoint}")


@click.command()
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
