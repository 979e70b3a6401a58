"""What a trained model makes of one image: its answer, what ran for it, and what that cost."""

import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepmoe.analysis.names import readable_layers
from deepmoe.checkpoint import Checkpoint
from deepmoe.data import read_image
from deepmoe.data.decode import open_image, read_whole_image
from deepmoe.data.reading import Unreadable, read_file
from deepmoe.demo.budgets import Slider, set_budget, slider_of
from deepmoe.errors import UserError
from deepmoe.evaluation import Prediction, SegmentationPrediction, Unanswered, predict_each
from deepmoe.hard_moe import HardMoE
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.sparse import sparsify
from deepmoe.timing import timed

MOST_BYTES = 32 * 2**20  # of an upload
# A photo may be large: it is made small first. A segmentation runs all of its pixels.
MOST_PIXELS = {"classification": 2**26, "segmentation": 2**21}
# For each image. The engine takes some runs to find its fastest way; a median of a few says more
# than one time.
WARM_UP_SECONDS, WARM_UP_ROUNDS = 1.0, 34
TIMED_SECONDS, TIMED_ROUNDS = 0.4, 15


@dataclass(frozen=True)
class LayerChannels:
    """A gated layer, and which of its channels ran."""

    name: str
    ran: tuple[bool, ...]


@dataclass(frozen=True)
class Shown:
    """What is shown of an image.

    Attributes:
        answer: classes, MACs, and the median of a few times.
        layers: what ran, of each gated layer; empty for a network without gates.
        dense_ms: milliseconds of the network with all channels, in the same engine; `None` where
            the model runs all channels itself, or its original is not there any more.
        pixels_HWC: the image as the network saw it.
        expert: which one ran, from 1 on, and how many there are; `None` without experts.
        note: what else is to be known of the times.
    """

    answer: Prediction | SegmentationPrediction
    layers: tuple[LayerChannels, ...]
    dense_ms: float | None
    pixels_HWC: np.ndarray = field(repr=False, compare=False)
    expert: tuple[int, int] | None = None
    note: str | None = None

    @property
    def answered_by(self) -> str:
        """`embedding`, where an image left by the early exit, or `network`."""
        return getattr(self.answer, "answered_by", "network")


class Demo:
    """A model that answers one image after the other; threads take turns.

    It runs in the sparse engine, so that times are those of the channels that ran. Where the engine
    can't run a model, PyTorch does, and `engine_note` says why.

    Args:
        checkpoint: on the CPU.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        model = checkpoint.model
        self.checkpoint, self.info = checkpoint, checkpoint.info
        self.slider = slider_of(model, checkpoint.info)
        plain = DeepMoE(None, None, model.one_network, model.gating, unpruned=model.unpruned)
        try:
            self._runs: DeepMoE = sparsify(self._ready(model))
            self._dense: DeepMoE = sparsify(plain.eval())
            self.engine_note = None
        except UserError as error:
            # A copy of its own: budgets are set on it.
            self._runs, self._dense = self._ready(model), plain.eval()
            self.engine_note = str(error)
        skips = model.gated or model.embedding is not None
        self._compares = skips and model.unpruned is None
        self._turn = threading.Lock()

    @torch.inference_mode()
    def show(self, image: str | Path, budget: float | None = None) -> Shown:
        """Answers an image.

        Args:
            image: a file that anyone may have made.
            budget: a value of `slider`; `None` is where it starts, and the only one without slider.

        Raises:
            UserError: for an image that can't be used, or a budget out of range.
        """
        path = Path(image)
        check_upload(path, MOST_PIXELS[self.info.task])
        try:
            with self._turn:
                return self._show(path, budget)
        except UserError as error:  # whoever uploads a file does not know where it lies here
            raise UserError(str(error).replace(str(path), path.name)) from error

    def _show(self, path: Path, budget: float | None) -> Shown:
        pixels_CHW = self._read(path)
        x_BCHW = self.checkpoint.model.as_input(self.info.normalise(pixels_CHW[None]))
        if isinstance(self.slider, Slider):
            value = self.slider.value if budget is None else budget
            set_budget(self.checkpoint.model, self._runs, self.slider, x_BCHW, value)
        (answer,) = predict_each(replace(self.checkpoint, model=self._runs), [path])
        if isinstance(answer, Unanswered):
            raise UserError(answer.error)
        output, ms, dense_ms = self._timed(x_BCHW)
        return Shown(
            answer=replace(answer, ms=ms),
            layers=self._layers(output),
            dense_ms=dense_ms,
            pixels_HWC=pixels_CHW.permute(1, 2, 0).numpy(),
            expert=self._expert(x_BCHW),
            note=self._note(ms, dense_ms),
        )

    def _ready(self, model: DeepMoE) -> DeepMoE:
        """The model, sharing its weights, with an exit that can be set."""
        if isinstance(model, HardMoE) or model.on_the_way or model.embedding is None:
            return model
        own = model.with_gates(codebook=model.codebook, thresholds=model.thresholds)
        if isinstance(self.slider, Slider) and self.slider.by == "exits":
            own.exit_at = torch.tensor(self.slider.value, dtype=next(model.parameters()).dtype)
        return own

    def _read(self, path: Path) -> Tensor:
        if self.info.task == "segmentation":
            return read_whole_image(path)
        return read_image(path, self.info.size[0], self.checkpoint.config.data)

    def _timed(self, x_BCHW: Tensor) -> tuple[DeepMoEOutput, float, float | None]:
        """What the model gives, and the median milliseconds of it and of the dense network."""
        self._rounds(x_BCHW, WARM_UP_SECONDS, WARM_UP_ROUNDS)
        output, own, dense = self._rounds(x_BCHW, TIMED_SECONDS, TIMED_ROUNDS)
        return output, statistics.median(own), statistics.median(dense) if dense else None

    def _rounds(
        self, x_BCHW: Tensor, most_seconds: float, most: int
    ) -> tuple[DeepMoEOutput, list[float], list[float]]:
        """The model's output, and the milliseconds of it and of the dense network, side by side."""
        own: list[float] = []
        dense: list[float] = []
        end = time.perf_counter() + most_seconds
        while not own or (time.perf_counter() < end and len(own) < most):
            output, seconds = timed(partial(self._runs, x_BCHW), x_BCHW.device)
            own.append(1e3 * seconds)
            if self._compares:
                dense.append(1e3 * timed(partial(self._dense, x_BCHW), x_BCHW.device)[1])
        return output, own, dense

    def _layers(self, output: DeepMoEOutput) -> tuple[LayerChannels, ...]:
        if output.gates is None:
            return ()
        left = output.exited is not None and bool(output.exited[0])
        names = readable_layers(self.checkpoint.model.gating.names)
        return tuple(
            LayerChannels(name, tuple(((g_BC[0] != 0) & (not left)).tolist()))
            for name, g_BC in zip(names, output.gates, strict=True)
        )

    def _note(self, ms: float, dense_ms: float | None) -> str | None:
        if self.engine_note is not None:
            return f"PyTorch ran this, which computes all channels: {self.engine_note}."
        if dense_ms is not None and ms >= dense_ms:
            gated = self.checkpoint.model.gated
            why = ": choosing channels took longer than running them all" if gated else ""
            return f"No time was saved{why}."
        return None

    def _expert(self, x_BCHW: Tensor) -> tuple[int, int] | None:
        model = self.checkpoint.model
        if not isinstance(model, HardMoE):
            return None
        return int(model.cluster(x_BCHW)[0]) + 1, len(model.centroids)


def check_upload(path: Path, most_pixels: int) -> None:
    """Refuses what is too large, or no image, before memory is taken for it.

    Raises:
        UserError: with a sentence for whoever uploaded the file.
    """
    try:
        with open_image(read_file(path, MOST_BYTES)) as image:
            pixels = image.width * image.height
    except Unreadable as error:
        raise UserError(f"cannot read image {path.name}: {error}") from error
    if pixels > most_pixels:
        raise UserError(
            f"{path.name} has {image.width} x {image.height} pixels: "
            f"at most {most_pixels / 1e6:.0f} million are taken here"
        )
