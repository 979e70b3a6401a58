"""How much time exits save: the sparse engine with and without them, batch for batch."""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepmoe.bench.benchmark import Benchmark, Timed, compared
from deepmoe.data import Batch
from deepmoe.errors import UserError
from deepmoe.model import DeepMoE
from deepmoe.progress import followed
from deepmoe.sparse import InferenceModel, sparsify
from deepmoe.timing import timed

# Batches to warm up with, until ways are chosen and graphs captured: no more of them, and once
# there were a few no longer.
MOST_WARM_UP, LEAST_WARM_UP, WARM_UP_SECONDS = 200, 3, 15.0
MOST_THREADS_A_CORE = 4


def bench_exits(
    model: DeepMoE,
    data: Iterable[Batch],
    *,
    batch: int,
    dtype: torch.dtype | None = None,
    images: int | None = None,
    evaluated_on: str | None = None,
) -> "ExitsBenchmark":
    """Times one pass over images, each batch with exits and without, in turn.

    Both are the same sparse model, its exits switched on and off: they share weights and what it
    has planned. Without exits, a model that has no gates is its folded base network alone.

    Args:
        model: with exits, on the device to measure.
        data: normalised images and labels; what does not fill a batch at the end is left out.
        batch: images at once.
        dtype: of the convolutions; the model's own if not given.
        images: to stop after.
        evaluated_on: what the images are called.

    Returns:
        Share of the images that exit, accuracies, mean milliseconds a batch, images a second, and
        `ratio`: the time with exits over that without.
    """
    if model.exit_at is None:
        raise UserError("the model has no exits: add some with deepmoe exits")
    sparse, count = sparsify(model, dtype=dtype), None if images is None else images // batch

    def batches() -> Iterator[Batch]:
        return itertools.islice(_whole_batches(model, data, batch), count)

    if next(batches(), None) is None:
        raise UserError(f"there are too few images for a batch of {batch}")
    exit_at = sparse.exit_at
    _warm_up([_Way(sparse, exit_at), _Way(sparse, None)], batches)
    ways = {"": _Way(sparse, exit_at), "_without": _Way(sparse, None)}
    there = getattr(data, "images", None)
    total = count if count is not None or there is None else there // batch
    for number, (x_BCHW, labels) in enumerate(followed(batches(), "timing", total, "batches")):
        # Which one comes first changes, too: it finds the images in no cache.
        for way in ways.values() if number % 2 else reversed(ways.values()):
            way.run(x_BCHW, labels)
    figures = {name + end: v for end, way in ways.items() for name, v in way.figures(batch).items()}
    values = {
        "batch": batch,
        "images": ways[""].images,
        "exited": ways[""].exited / ways[""].images,
        **figures,
        "ratio": ways[""].seconds / ways["_without"].seconds,
        "device": str(next(model.parameters()).device),
        "dtype": str(sparse.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "evaluated_on": evaluated_on,
    }
    return ExitsBenchmark(values)


@dataclass(frozen=True)
class ExitsBenchmark(Benchmark):
    """How much time exits save."""

    unit = "ms a batch"

    def timed(self) -> list[Timed]:
        """Without exits, and with them."""
        values = self.values
        all_run = "every image runs the whole network"
        some_exit = f"{values['exited']:.1%} of the images are answered by the embedding"
        return [
            Timed("without exits", values["ms_without"], all_run),
            Timed("with exits", values["ms"], some_exit),
        ]

    @property
    def sentence(self) -> str:
        """Both times, and both accuracies."""
        values = self.values
        return (
            f"without exits {values['ms_without']:.2f} ms, with exits {values['ms']:.2f} ms: "
            f"{compared(values['ms'], values['ms_without'])}; accuracy "
            f"{values['accuracy_without']:.2%} and {values['accuracy']:.2%}"
        )

    def setting(self) -> str:
        """Batch, images, device."""
        values = self.values
        named = "" if values["evaluated_on"] is None else f"{values['evaluated_on']} "
        return (
            f"batches of {values['batch']}, {values['images']:,} {named}images, "
            f"{values['images_per_second_without']:,.0f} and {values['images_per_second']:,.0f} "
            f"images/s; {values['device']}, {values['dtype']}"
        )


@contextmanager
def threads_of_cpu(count: int | None) -> Iterator[None]:
    """So many threads, where a number is given.

    Raises:
        UserError: for many more than there are cores: far too many would end the process.
    """
    most = MOST_THREADS_A_CORE * (os.cpu_count() or 1)
    if count is not None and not 1 <= count <= most:
        raise UserError(f"there are 1 to {most} threads on this machine, not {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Way:
    """A sparse model with its exits on or off, and what it has done so far."""

    sparse: InferenceModel
    exit_at: Tensor | None
    images: int = 0
    right: int = 0
    exited: int = 0
    seconds: float = 0.0

    def run(self, x_BCHW: Tensor, labels: Tensor) -> None:
        self.sparse.exit_at = self.exit_at
        output, seconds = timed(partial(self.sparse, x_BCHW), x_BCHW.device)
        self.images += len(x_BCHW)
        self.right += int((output.logits.argmax(dim=1) == labels).sum())
        self.exited += 0 if output.exited is None else int(output.exited.sum())
        self.seconds += seconds

    def figures(self, batch: int) -> dict[str, float]:
        return {
            "accuracy": self.right / self.images,
            "ms": 1e3 * self.seconds * batch / self.images,
            "images_per_second": self.images / self.seconds,
        }


def _warm_up(ways: list[_Way], batches: Callable[[], Iterator[Batch]]) -> None:
    started = time.perf_counter()
    again_and_again = itertools.chain.from_iterable(batches() for _ in itertools.count())
    few = followed(itertools.islice(again_and_again, MOST_WARM_UP), "warming up", None, "batches")
    for number, (x_BCHW, labels) in enumerate(few):
        if number >= LEAST_WARM_UP and time.perf_counter() - started > WARM_UP_SECONDS:
            break
        for way in ways:
            way.run(x_BCHW, labels)


def _whole_batches(model: DeepMoE, data: Iterable[Batch], size: int) -> Iterator[Batch]:
    """The images in batches of this size, where the model is."""
    device = next(model.parameters()).device
    rest: Batch | None = None
    for x_BCHW, labels in data:
        x_BCHW, labels = model.as_input(x_BCHW), labels.to(device)
        if rest is not None:
            x_BCHW, labels = torch.cat([rest[0], x_BCHW]), torch.cat([rest[1], labels])
        whole = len(labels) // size * size
        for start in range(0, whole, size):
            yield x_BCHW[start : start + size], labels[start : start + size]
        rest = x_BCHW[whole:], labels[whole:]
