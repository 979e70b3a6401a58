"""Serves the page to this machine alone."""

import socket
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepmoe.analysis.names import readable_data
from deepmoe.checkpoint import Checkpoint
from deepmoe.console import say
from deepmoe.data import open_data
from deepmoe.demo.guard import HOSTS
from deepmoe.demo.page import make_app
from deepmoe.demo.showing import Demo
from deepmoe.errors import UserError
from deepmoe.extras import require

SAMPLES = 8  # test images to choose from


def serve(checkpoint: Checkpoint, port: int, *, browser: bool) -> None:
    """Serves the page until it is interrupted.

    Args:
        checkpoint: of the model that answers.
        port: to listen at.
        browser: whether to open the page in one.

    Raises:
        UserError: where the port is taken, or a package is missing.
    """
    require("demo", "gradio")
    with listening(port) as listener, tempfile.TemporaryDirectory(prefix="deepmoe-demo-") as folder:
        server = make_server(checkpoint, Path(folder), sample_images(checkpoint, Path(folder)))
        address = f"http://{HOSTS[0]}:{listener.getsockname()[1]}/"
        say(f"the demo is at {address} (Ctrl-C ends it)")
        if browser:
            webbrowser.open(address)  # it waits until the server below answers
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            say("the demo has ended")


def make_server(checkpoint: Checkpoint, folder: Path, samples: Sequence[Path] = ()) -> Any:
    """A uvicorn server of the page, which keeps uploads in a folder, where samples lie too."""
    require("demo", "gradio")
    import uvicorn

    config = checkpoint.config
    title = f"{config.model.name} on {readable_data(config.data)}"
    app = make_app(Demo(checkpoint), title, folder, samples)
    # Pages that stay open keep a connection each: they are not waited for.
    return uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """A socket that listens at a port of this machine, for this machine; 0 is any that is free.

    Raises:
        UserError: where the port can't be had.
    """
    with socket.socket() as listener:
        # Else the port of a demo that has just ended could not be had for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOSTS[0], port))
            listener.listen()
        except OSError as error:
            raise UserError(
                f"port {port} can't be used ({error.strerror}): choose another with --port"
            ) from error
        yield listener


def sample_images(checkpoint: Checkpoint, folder: Path) -> list[Path]:
    """Images to start with, where the data is built in: nobody has those as files."""
    from PIL import Image

    config = checkpoint.config.data
    if config.name != "digits":
        return []
    try:
        data = open_data(config, batch_size=SAMPLES, info=checkpoint.info)
    except UserError:  # scikit-learn, which has the images, is an extra
        return []
    x_BCHW, _ = next(iter(data.evaluation))
    paths = []
    for number, pixels_CHW in enumerate(checkpoint.info.to_pixels(x_BCHW[:SAMPLES]), start=1):
        paths.append(folder / f"test-image-{number}.png")
        Image.fromarray(pixels_CHW.permute(1, 2, 0).numpy()).save(paths[-1])
    return paths
