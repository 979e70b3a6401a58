"""All verbs together. Each imports what it needs when it is called, so that --help stays quick."""

import sys
import warnings
from typing import Any

import click

from deepmoe.cli.analysis import analyze, report
from deepmoe.cli.bench import bench
from deepmoe.cli.checkpoints import curve, cut, evaluate_checkpoint
from deepmoe.cli.compare import compare, measure_run
from deepmoe.cli.demo import demo
from deepmoe.cli.examples import missing
from deepmoe.cli.exits import exits
from deepmoe.cli.export import export
from deepmoe.cli.models import config, describe, macs, models
from deepmoe.cli.paper import paper
from deepmoe.cli.predict import predict
from deepmoe.cli.sweep import sweep
from deepmoe.cli.training import quickstart, teach, train
from deepmoe.console import complain, drop_output, fill_closed_outputs, say
from deepmoe.errors import OutputClosed, UserError
from deepmoe.progress import showing

MOST_CHARACTERS = 2000  # of a sentence; lists of names may be long
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "size calculation overflowed",
)


class Verbs(click.Group):
    """Turns mistakes into one clear sentence; anything else is a bug and keeps its traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which a newcomer needs them, not by the alphabet."""
        return list(self.commands)

    def main(self, *arguments: Any, **options: Any) -> Any:
        fill_closed_outputs()
        warnings.showwarning = _show_warning
        try:
            with showing():
                return super().main(*arguments, **{**options, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            assert error.ctx is not None
            say(error.ctx.get_help())
            sys.exit(0)
        except click.MissingParameter as error:
            message, code = missing(error), error.exit_code
        except OutputClosed as error:
            drop_output()
            message, code = "" if error.quiet else str(error), error.exit_code
        except UserError as error:
            message, code = str(error), error.exit_code
        except click.ClickException as error:
            message, code = error.format_message(), error.exit_code
        except (click.Abort, KeyboardInterrupt):
            message, code = "interrupted", 130
        except OSError as error:
            place = f"{error.filename}: " if error.filename is not None else ""
            message, code = f"{place}{error.strerror or error}", 2
        except (RuntimeError, MemoryError) as error:
            # PyTorch has no class of its own for a lack of the processor's memory.
            lacking = isinstance(error, MemoryError) or any(t in str(error) for t in OUT_OF_MEMORY)
            if not lacking:
                raise
            message, code = "there is not enough memory for this: try a smaller batch or model", 2
        if message:
            complain(f"Error: {_shortened(message)}")
        sys.exit(code)


def _shortened(message: str) -> str:
    """Without the middle, where it quotes what somebody has given at length."""
    if len(message) <= MOST_CHARACTERS:
        return message
    return f"{message[: MOST_CHARACTERS - 200]} ... {message[-200:]}"


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """What a user should know, without the line of code that says it."""
    complain(f"Warning: {str(message).partition(chr(10))[0]}")


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deepmoe")
def main() -> None:
    """Convolutional networks that spend on each image only what it needs."""


for verb in (
    quickstart,
    describe,
    train,
    evaluate_checkpoint,
    predict,
    demo,
    report,
    analyze,
    bench,
    exits,
    curve,
    cut,
    export,
    compare,
    measure_run,
    sweep,
    teach,
    paper,
    config,
    models,
    macs,
):
    main.add_command(verb)
