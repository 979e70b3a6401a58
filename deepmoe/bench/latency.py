"""How long one image takes, beside the dense network: in turn, so that noise meets both alike."""

import itertools
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepmoe.model import DeepMoE
from deepmoe.progress import followed
from deepmoe.sparse import sparsify
from deepmoe.timing import timed

WARM_UP = 20  # images, until the engine has chosen its ways


@dataclass(frozen=True)
class Latency:
    """Mean milliseconds an image, one image at a time.

    Attributes:
        ms: of the model.
        dense_ms: of the dense network, measured in turn with it.
        images: timed.
        threads: that were used.
    """

    ms: float
    dense_ms: float
    images: int
    threads: int

    @property
    def ratio(self) -> float:
        """The model's time over that of the dense network."""
        return self.ms / self.dense_ms


@torch.inference_mode()
def bench_latency(model: DeepMoE, dense: DeepMoE, images: Tensor) -> Latency:
    """Times a model and the dense network on the same images, one at a time.

    Both run as they would be deployed: by the sparse engine, with batch norms folded. Gates that
    are made on the way through the network are beyond the engine: such a model runs as it is.

    Args:
        model: in evaluation mode, on a CPU.
        dense: the network to compare with, there too.
        images: normalised; each is timed once, after a few to warm up.
    """
    calls = [m if m.on_the_way else sparsify(m) for m in (model, dense)]
    device, seconds = images.device, [0.0, 0.0]
    for image in itertools.islice(itertools.cycle(images.split(1)), WARM_UP):
        for call in calls:
            call(image)
    timing = followed(images.split(1), "timing", len(images), "images")
    for number, image in enumerate(timing):
        for which in (0, 1) if number % 2 else (1, 0):  # the first finds the image in no cache
            seconds[which] += timed(partial(calls[which], image), device)[1]
    ms = [1e3 * s / len(images) for s in seconds]
    return Latency(ms[0], ms[1], len(images), torch.get_num_threads())
