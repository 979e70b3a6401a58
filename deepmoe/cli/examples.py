"""An example for each verb: at the end of its help, and where an argument is missing."""

from typing import Any

import click

START = "Example: "


def example(command: str) -> dict[str, Any]:
    """What a verb is declared with, so that it has an example."""
    return {"epilog": f"{START}{command}"}


def missing(error: click.MissingParameter) -> str:
    """What is missing, how the verb is called, and an example, in one line."""
    if error.ctx is None or error.param is None:
        return error.format_message()
    command = error.ctx.command
    what = error.param.get_error_hint(error.ctx).replace("'", "").removesuffix("...")
    usage = " ".join([error.ctx.command_path, *command.collect_usage_pieces(error.ctx)])
    typed = (command.epilog or "").removeprefix(START)
    return f"{what} is missing: {usage}" + (f"; for example: {typed}" if typed else "")
