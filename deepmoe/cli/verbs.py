"""All verbs together. Each imports what it needs when it is called, so that --help stays quick."""

import sys
from typing import Any

import click

from deepmoe.cli.bench import bench
from deepmoe.cli.checkpoints import curve, cut, evaluate_checkpoint, predict
from deepmoe.cli.models import config, macs, models
from deepmoe.cli.sweep import sweep
from deepmoe.cli.training import quickstart, train
from deepmoe.errors import UserError


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


for verb in (
    train,
    evaluate_checkpoint,
    predict,
    curve,
    cut,
    sweep,
    bench,
    macs,
    models,
    config,
    quickstart,
):
    main.add_command(verb)
