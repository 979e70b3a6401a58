"""A plain network as a file's bytes, and such bytes as something to call."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.extras import require

Format = Literal["onnx", "torch-export"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
INPUT, OUTPUT, BATCH = "images", "logits", "batch"
NOTES = "notes.json"  # in a file of torch.export: classes, and how images are normalised
MOST_BYTES = 2**31 - 1  # of an ONNX file without others beside it
Call = Callable[[Tensor], Tensor]


def check_installed(format: Format) -> None:
    """Tells what to install where a package is missing."""
    if format == "onnx":
        require("onnx", "onnx", "onnxscript", "onnxruntime")


class _Named(nn.Module):
    """A network whose input has a name that says what it is."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)


def as_program(network: nn.Module, image: Tensor, *, one_image: bool) -> Any:
    """A network captured by `torch.export`, for any number of images unless told otherwise.

    Some networks hold on to the number of images that they are captured with: one, then.
    """
    network = _Named(network).eval()
    with _quiet(), torch.no_grad():
        if not one_image:
            two, batch = image.expand(2, -1, -1, -1).contiguous(), torch.export.Dim(BATCH)
            with contextlib.suppress(Exception):  # of anybody's code
                return torch.export.export(network, (two,), dynamic_shapes=({0: batch},))
        try:
            return torch.export.export(network, (image,))
        except Exception as error:
            raise UserError(f"torch.export can't capture the network: {_why(error)}") from error


def as_bytes(program: Any, format: Format, notes: dict[str, Any]) -> bytes:
    """The content of a file."""
    written = json.dumps(notes)
    if format == "torch-export":
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={NOTES: written})
        return file.getvalue()
    with _quiet():
        try:
            made: Any = torch.onnx.export(
                program, (), dynamo=True, verbose=False, input_names=[INPUT], output_names=[OUTPUT]
            )
        except Exception as error:
            raise UserError(f"the network can't be written as ONNX: {_why(error)}") from error
    made.model.metadata_props["deepmoe"] = written
    proto = made.model_proto
    _name_batch(proto)
    _forget_origins(proto.graph)
    if proto.ByteSize() > MOST_BYTES:
        raise UserError("the network is too large for one ONNX file: use --format torch-export")
    return proto.SerializeToString()


def runtime(content: bytes, format: Format) -> Call:
    """What a file computes, by what would run it elsewhere.

    Raises:
        UserError: where that can't read the file.
    """
    try:
        return _runtime(content, format)
    except Exception as error:
        raise UserError(
            f"{runtime_name(format)} can't read the exported network, so nothing was written: "
            f"{_why(error)}"
        ) from error


def _runtime(content: bytes, format: Format) -> Call:
    if format == "torch-export":
        return torch.export.load(io.BytesIO(content)).module()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Idle threads of one network would spin while another one is timed.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def call(x_BCHW: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: x_BCHW.numpy()})[0])

    return call


def runtime_name(format: Format) -> str:
    """What runs such a file, with its version."""
    if format == "torch-export":
        return f"PyTorch {torch.__version__}"
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__}"


def _why(error: BaseException) -> str:
    """What went wrong first, in one line: exporters wrap it in advice for their developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def _name_batch(proto: Any) -> None:
    """The exporter calls the number of images by a number of its own."""
    graph = proto.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim[:1]:
            if size.dim_param:
                size.dim_param = BATCH


def _forget_origins(graph: Any) -> None:
    """Every node knows the lines of code that it comes from, which is far more than it computes."""
    for node in graph.node:
        node.ClearField("metadata_props")
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _forget_origins(attribute.g)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters talk much of what nobody asked."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
