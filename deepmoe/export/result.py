"""What an export says of itself."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmoe.bench.benchmark import compared, milliseconds
from deepmoe.console import table_text
from deepmoe.export.networks import Route
from deepmoe.figures import bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Export:
    """A file that runs elsewhere, checked and timed.

    Attributes:
        path: of the file.
        format: `onnx` or `torch-export`.
        route: `static` or `codes`; `None` for a model without gates.
        told: what the network in it is, in words.
        inputs: names and shapes.
        outputs: names and shapes.
        bytes: of the file.
        parameters: of the network in it.
        dense_parameters: of the network with all channels.
        max_error: largest difference to the network that was exported, over its largest output.
        agreement: share of images (of pixels, for segmentation) that get the model's own class.
        images: that it was checked on.
        checked_on: what these are called.
        ms: milliseconds an image in `runtime`, one at a time.
        dense_ms: of the network with all channels in PyTorch, measured in turn.
        dense_runtime_ms: of that network in `runtime`.
        runtime: what runs the file, with its version.
        threads: that were used.
    """

    path: str
    format: str
    route: Route | None
    told: str
    inputs: dict[str, list[Any]]
    outputs: dict[str, list[Any]]
    bytes: int
    parameters: int
    dense_parameters: int
    max_error: float
    agreement: float
    images: int
    checked_on: str
    ms: float
    dense_ms: float
    dense_runtime_ms: float
    runtime: str
    threads: int

    @property
    def ratio(self) -> float:
        """The file's time over that of the dense network, run in the same way."""
        return self.ms / self._dense_there

    @property
    def _dense_there(self) -> float:
        """Dense where the file runs: a file for PyTorch stands beside PyTorch itself."""
        return self.dense_ms if self.format == "torch-export" else self.dense_runtime_ms

    def _timed(self) -> dict[str, float]:
        times = {"dense, PyTorch": self.dense_ms}
        if self.format != "torch-export":
            times[f"dense, {self.runtime}"] = self.dense_runtime_ms
        return {**times, Path(self.path).name: self.ms}

    @property
    def sentence(self) -> str:
        """What the file is worth beside the dense network where it runs."""
        dense, ours = milliseconds(self._dense_there), milliseconds(self.ms)
        told = f"in {self.runtime}: dense {dense} ms, this file {ours} ms: "
        told += compared(self.ms, self._dense_there)
        if self.format == "onnx":
            told += f" (dense in PyTorch: {milliseconds(self.dense_ms)} ms)"
        return told

    def __str__(self) -> str:
        rows = [
            (name, f"{ms:.2f}", f"{ms / self.dense_ms:.2f}") for name, ms in self._timed().items()
        ]
        weights = self.parameters / self.dense_parameters
        return "\n".join(
            [
                self.sentence,
                table_text(("", "ms an image", "of dense, PyTorch"), rows),
                f"the file holds {self.told}: {self.parameters / 1e6:.2f} M parameters "
                f"({weights:.1%} of dense), {self.bytes / 1e6:.1f} MB",
                f"takes {_shapes(self.inputs)}, normalised; gives {_shapes(self.outputs)}",
                f"checked on {self.images} {self.checked_on} images: largest error "
                f"{self.max_error:.1e}; {self.agreement:.1%} get the class that the model gives",
                f"written: {self.path}",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "ratio": self.ratio}

    def plot(self) -> "Figure":
        """The times as bars."""
        return bars(self._timed(), "ms an image", self.sentence, "{:.2f}")


def _shapes(tensors: dict[str, list[Any]]) -> str:
    return ", ".join(f"{name} [{', '.join(map(str, s))}]" for name, s in tensors.items())
