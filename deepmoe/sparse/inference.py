"""Models that are made once, of a trained one, and then only run."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, Self

import torch
from torch import Tensor

from deepmoe.costs import count_costs
from deepmoe.cuda_graphs import GraphCache, Work
from deepmoe.errors import UserError
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.sparse.planner import Plan


class InferenceModel(DeepMoE):
    """What `sparsify` makes: weights are packed, so that it can neither be trained nor moved."""

    def set_up(self, device: torch.device) -> None:
        """To be called once, when the model is made.

        Args:
            device: where it runs.
        """
        self.lock = threading.Lock()  # memory of one run is used again by the next
        self.seen: set[tuple[torch.Size, torch.dtype, torch.device]] = set()  # images that fit
        self.graphs = GraphCache(device) if device.type == "cuda" else None
        self.last_run = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def plan(self) -> Plan:
        """How the batches and layers that came up are run: here, always in one way."""
        return Plan()

    @torch.inference_mode()
    def forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        self._check_images(x_BCHW)
        if self.last_run is None:
            with self.lock:
                return self._as_spoilt_as(x_BCHW, self._forward(x_BCHW))
        with self.lock, torch.cuda.device(x_BCHW.device):
            # Another thread's run may be on another stream, and not done yet.
            torch.cuda.current_stream().wait_event(self.last_run)
            output = self._forward(x_BCHW)
            self.last_run.record()
            return output

    def _check_images(self, x_BCHW: Tensor) -> None:
        """Refuses what would give a wrong result, or none: in one sentence."""
        seen = (x_BCHW.shape, x_BCHW.dtype, x_BCHW.device)
        if seen in self.seen:  # looked at before: small batches take less time than a look
            return
        colours = self.gating.graph.colours
        if x_BCHW.dim() != 4 or x_BCHW.shape[1] != colours or not x_BCHW.is_floating_point():
            raise UserError(
                f"images come normalised, as floats of shape (images, {colours}, height, width), "
                f"not as {str(x_BCHW.dtype).removeprefix('torch.')} of {tuple(x_BCHW.shape)}"
            )
        if not len(x_BCHW):
            raise UserError("there are no images in the batch")
        own = next(self.parameters()).device
        if x_BCHW.device != own:
            raise UserError(f"the images are on {x_BCHW.device}, but the model is on {own}")
        # Tells if they are too small for the network.
        count_costs(self, (x_BCHW.shape[-2], x_BCHW.shape[-1]))
        self.seen.add(seen)

    def _as_spoilt_as(self, x_BCHW: Tensor, output: DeepMoEOutput) -> DeepMoEOutput:
        """Not a number where pixels are none: the engine may leave out whatever they spoil.

        On a GPU, nobody looks: that would take longer than some of the work.
        """
        finite_B = x_BCHW.flatten(1).sum(dim=1, dtype=torch.float32).isfinite()
        if bool(finite_B.all()):
            return output
        spoilt = ~finite_B.view(-1, *[1] * (output.logits.dim() - 1))
        return output._replace(logits=output.logits.masked_fill(spoilt, float("nan")))

    def _forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        """What `forward` gives, of images that are known to fit."""
        raise NotImplementedError

    def check_finite(self) -> None:
        """The model was looked at before it was made sparse."""

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise UserError("a sparse model can't be trained: train the model, then sparsify it")
        return super().train(mode)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise UserError("a sparse model has no weights to save: save the model it was made of")

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise UserError("a sparse model keeps its weights: load them, then sparsify the model")

    def __reduce_ex__(self, protocol: Any) -> Any:  # of copies and pickles
        raise UserError("a sparse model can't be copied or pickled: sparsify the model once more")

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        """What `to`, `cuda` or `half` come down to: packed weights would stay behind."""
        raise UserError("a sparse model stays as it was made: move the model, then sparsify it")

    def _run(self, name: Hashable, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Calls a function; by a CUDA graph where that is possible."""
        if self.graphs is None:
            return function(*inputs)
        return self.graphs.run(Work(name, function, inputs))
