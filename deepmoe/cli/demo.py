"""The verb `demo`."""

from pathlib import Path

import click

from deepmoe.cli.common import network_option
from deepmoe.cli.examples import example
from deepmoe.errors import UserError

QUICKSTART = Path("runs/quickstart/deepmoe/last.safetensors")
PORT = 7860


@click.command(**example("deepmoe demo runs/quickstart/deepmoe/last.safetensors"))
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@network_option
@click.option("--port", default=PORT, show_default=True, help="Port to listen on.")
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
def demo(checkpoint: Path | None, network: str | None, port: int, no_browser: bool) -> None:
    """Try CHECKPOINT on your own images in a local web page.

    The page shows which channels ran for an image, and what it cost. Without CHECKPOINT, the
    quickstart's is used. The page can be opened on this machine only, and no data leaves it.
    """
    from deepmoe.extras import require

    require("demo", "gradio")
    if not 1 <= port <= 65535:
        raise UserError(f"--port must be from 1 to 65535, not {port}")
    if checkpoint is None:
        if not QUICKSTART.is_file():
            raise UserError(f"{QUICKSTART} does not exist: run deepmoe quickstart first")
        checkpoint = QUICKSTART
    from deepmoe.checkpoint import load_checkpoint
    from deepmoe.demo.server import serve

    serve(load_checkpoint(checkpoint, network=network), port, browser=not no_browser)
