"""The verb `export`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepmoe.cli.common import data_option, json_option, network_option, parse_size
from deepmoe.cli.examples import example
from deepmoe.console import say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.checkpoint import Checkpoint
    from deepmoe.data import DataSource
    from deepmoe.export import Format, Route

USE = {
    "onnx": "onnxruntime.InferenceSession({path!r}).run(None, {{'images': images}})",
    "torch-export": "torch.export.load({path!r}).module()(images)",
}


@click.command(**example("deepmoe export runs/quickstart/deepmoe/last.safetensors --format onnx"))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["onnx", "torch-export"]),
    default="onnx",
    show_default=True,
    help="For ONNX Runtime, or for PyTorch without deepmoe.",
)
@click.option(
    "--route",
    type=click.Choice(["static", "codes"]),
    help="For a gated network. static: one set of channels for all images. codes: the channels of "
    "each image's code. [default: codes if the model has some, otherwise static]",
)
@click.option("--codes", type=int, help="Learn this many codes, for a gated network without any.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The file to write. [default: next to CHECKPOINT]",
)
@click.option("--input", "size", metavar="PX", help="Image size: pixels a side, or HEIGHTxWIDTH.")
@data_option
@network_option
@json_option
def export(
    checkpoint: Path,
    format_: "Format",
    route: "Route | None",
    codes: int | None,
    out: Path | None,
    size: str | None,
    overrides: tuple[str, ...],
    network: str | None,
    as_json: bool,
) -> None:
    """Export CHECKPOINT to ONNX or torch.export; check and time it.

    Channels that never run are left out. Routes are found on CHECKPOINT's training images, or on
    the data that --set data... names.
    """
    from deepmoe.checkpoint import load_checkpoint
    from deepmoe.export import export_checkpoint
    from deepmoe.export.formats import ENDINGS, check_installed
    from deepmoe.files import check_writable

    check_installed(format_)
    # By its parts: a folder such as "." has no ending that could be another.
    out = out or checkpoint.parent / f"{checkpoint.stem}{ENDINGS[format_]}"
    if out.exists():
        raise UserError(f"{out} already exists: choose another --out")
    check_writable(out)
    asked = None if size is None else parse_size(size)
    loaded = load_checkpoint(checkpoint, network=network)
    data = _data_of(loaded, overrides, route, codes)
    result = export_checkpoint(
        loaded, out, format=format_, route=route, codes=codes, data=data, size=asked
    )
    if as_json:
        say(json.dumps(result.as_dict(), indent=2))
        return
    say(result)
    say("classes, and the mean and std to normalise images by, are in the file: docs/deploy.md")
    say(f"next, in Python: {USE[format_].format(path=str(out))}")


def _data_of(
    loaded: "Checkpoint", overrides: tuple[str, ...], route: "Route | None", codes: int | None
) -> "DataSource | None":
    """The data to find a route and to check on; `None` where it is gone, but not needed."""
    from deepmoe.cli.checkpoints import changed_data
    from deepmoe.config import GIVEN
    from deepmoe.data import open_data
    from deepmoe.export.networks import needs_images

    config = changed_data(loaded.config, overrides)
    if config.data.name == GIVEN:
        return None
    try:
        return open_data(config.data, batch_size=config.train.batch_size, info=loaded.info)
    except UserError as error:
        if overrides:
            raise
        if needs_images(loaded.model, route, codes):
            raise UserError(
                f"{error}; the route is found on training images: give them with "
                "--set data.root=PATH"
            ) from error
        return None
