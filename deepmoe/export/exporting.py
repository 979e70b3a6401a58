"""A checkpoint as a file for other runtimes: made, checked against the model, timed."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepmoe.checkpoint import Checkpoint
from deepmoe.data import DataSource
from deepmoe.errors import UserError
from deepmoe.export import formats
from deepmoe.export.formats import BATCH, ENDINGS, INPUT, OUTPUT, Call, Format
from deepmoe.export.networks import (
    ROUTES,
    Deployed,
    Route,
    dense_network,
    deployed,
    needs_images,
    with_codes,
)
from deepmoe.export.result import Export
from deepmoe.files import write_atomically
from deepmoe.model import DeepMoE
from deepmoe.progress import followed, progress
from deepmoe.timing import timed

CHECKED_IMAGES = 200
CHECKED_PIXELS = 2**24  # fewer images where they are large
WARM_UP, LEAST_TIMED, MOST_SECONDS = 5, 50, 20.0
TOLERANCE = 1e-3  # of the largest output: runtimes round differently
CPU = torch.device("cpu")


@torch.no_grad()
def export_checkpoint(
    loaded: Checkpoint,
    out: str | Path,
    *,
    format: Format = "onnx",
    route: Route | None = None,
    codes: int | None = None,
    data: DataSource | None = None,
    size: tuple[int, int] | None = None,
) -> Export:
    """Writes a model as a file for other runtimes; nothing is written that was not checked.

    Args:
        loaded: the checkpoint, on a CPU.
        out: the file.
        format: `onnx`, or `torch-export` for PyTorch without deepmoe.
        route: `static` or `codes`, as in `networks.deployed`.
        codes: routes to find, where the model is gated and has no codes.
        data: training images to find routes on, and others to check on; random ones are used where
            it is not given.
        size: height and width of the images; those that the model was trained for, if not given.

    Raises:
        UserError: for what can't be exported, packages that are missing, or a file that gives
            other answers than the model.
    """
    model, size = loaded.model.eval(), size or loaded.info.size
    _check_asked(model, format, route, codes, data)
    known = () if data is None else data.calibration
    if codes is not None:
        model = with_codes(model, codes, known, size)
    made = deployed(model, route, known, size)
    images, checked_on = _images_of(size, loaded, data)
    with progress(f"exporting to {format}"):
        program = formats.as_program(made.network, images[:1], one_image=made.one_image)
        content = formats.as_bytes(program, format, _notes(loaded, made))
        dense = dense_network(loaded)
        calls: dict[str, Call] = {
            "exported": formats.runtime(content, format),
            "dense": dense,
            "dense_runtime": _in_runtime(dense, images[:1], format, made.one_image),
        }
    error, agreement = _differences(calls["exported"], made.network, loaded, images)
    if not error <= TOLERANCE:  # nan is not, either
        raise UserError(
            f"the exported network differs from the model's by {error:.1e} of its largest output, "
            "so nothing was written: please report this"
        )
    times = _interleaved(calls, images)
    write_atomically(Path(out), content)
    inputs, outputs = _shapes(program)
    return Export(
        path=str(out),
        format=format,
        route=made.route,
        told=made.told,
        inputs=inputs,
        outputs=outputs,
        bytes=len(content),
        parameters=_parameters(made.network),
        dense_parameters=_parameters(dense),
        max_error=error,
        agreement=agreement,
        images=len(images),
        checked_on=checked_on,
        ms=times["exported"],
        dense_ms=times["dense"],
        dense_runtime_ms=times["dense_runtime"],
        runtime=formats.runtime_name(format),
        threads=torch.get_num_threads(),
    )


def _check_asked(
    model: DeepMoE, format: Format, route: Route | None, codes: int | None, data: DataSource | None
) -> None:
    """Tells what is missing or wrong before anything is computed."""
    if format not in ENDINGS:
        raise UserError(f"a format is one of {', '.join(ENDINGS)}, not {format!r}")
    if route not in (None, *ROUTES):
        raise UserError(f"a route is one of {', '.join(ROUTES)}, not {route!r}")
    formats.check_installed(format)
    model.check_ahead()
    model.check_finite()
    if codes is not None and route == "static":
        raise UserError("--codes goes with --route codes")
    if needs_images(model, route, codes) and data is None:
        raise UserError(
            "the route of a gated network is found on its training images: give them with "
            "--set data.name=... --set data.root=PATH, or train it with train.codes"
        )


def _in_runtime(network: nn.Module, image: Tensor, format: Format, one_image: bool) -> Call:
    """Captured as the file is: a runtime knows more of a network for one image alone."""
    program = formats.as_program(network, image, one_image=one_image)
    return formats.runtime(formats.as_bytes(program, format, {}), format)


def _images_of(
    size: tuple[int, int], loaded: Checkpoint, data: DataSource | None
) -> tuple[Tensor, str]:
    """Images to check on, and what they are called."""
    height, width = size
    count = max(1, min(CHECKED_IMAGES, CHECKED_PIXELS // (height * width)))
    found: list[Tensor] = []
    for x_BCHW, _ in data.evaluation if data is not None else ():
        if x_BCHW.shape[2] < height or x_BCHW.shape[3] < width:
            break  # too small for what is asked
        found.append(x_BCHW[:count, :, :height, :width].cpu().float())
        if sum(map(len, found)) >= count:
            break
    if found and data is not None:
        return torch.cat(found)[:count].contiguous(), data.evaluation_name
    generator = torch.Generator().manual_seed(0)
    colours = loaded.model.gating.graph.colours
    return torch.randn(min(count, 8), colours, height, width, generator=generator), "random"


def _differences(
    call: Call, network: nn.Module, loaded: Checkpoint, images: Tensor
) -> tuple[float, float]:
    """The largest error of the file against the network, and how often it says what the model does.

    The first is about the export, the second about the route.
    """
    model, largest, apart, same, all_ = loaded.model, 0.0, 0.0, 0, 0
    for x_1CHW in followed(images.split(1), "checking", len(images), "images"):
        found, expected = call(x_1CHW), network(x_1CHW)
        apart = max(apart, float((found - expected).abs().max().nan_to_num(torch.inf)))
        largest = max(largest, float(expected.abs().max()))
        own = model(model.as_input(x_1CHW)).logits.argmax(dim=1)
        same, all_ = same + int((found.argmax(dim=1) == own).sum()), all_ + own.numel()
    return apart / max(largest, 1e-12), same / all_


def _interleaved(calls: dict[str, Call], images: Tensor) -> dict[str, float]:
    """Mean milliseconds an image of each, in turn; what comes first changes."""
    for image in itertools.islice(itertools.cycle(images.split(1)), WARM_UP):
        for call in calls.values():
            call(image)
    seconds, names, runs = dict.fromkeys(calls, 0.0), list(calls), 0
    # All images equally often: what runs may depend on them.
    while not runs or (runs < LEAST_TIMED and sum(seconds.values()) < MOST_SECONDS):
        for image in followed(images.split(1), "timing", len(images), "images"):
            for name in names[runs % len(names) :] + names[: runs % len(names)]:
                seconds[name] += timed(partial(calls[name], image), CPU)[1]
            runs += 1
    return {name: 1e3 * total / runs for name, total in seconds.items()}


def _notes(loaded: Checkpoint, made: Deployed) -> dict[str, Any]:
    """What whoever runs the file must know: it travels in it."""
    info = loaded.info
    return {
        "classes": list(info.class_names),
        "mean": list(info.mean),
        "std": list(info.std),
        "task": info.task,
        "network": made.told,
    }


def _shapes(program: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Names and shapes of what goes in and comes out; the number of images may be free."""
    nodes = list(program.graph.nodes)
    users = [node for node in nodes if node.name in program.graph_signature.user_inputs]
    (result,) = nodes[-1].args[0]

    def shape(node: Any) -> list[Any]:
        return [side if isinstance(side, int) else BATCH for side in node.meta["val"].shape]

    return {INPUT: shape(users[0])}, {OUTPUT: shape(result)}


def _parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
