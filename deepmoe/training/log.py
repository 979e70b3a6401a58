"""The log of a run: JSONL and TensorBoard for programs, lines and progress for people."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepmoe.console import say
from deepmoe.errors import UserError, reason
from deepmoe.files import read_regular, write_atomically
from deepmoe.progress import Progress, is_shown, progress

METRICS_NAME = "metrics.jsonl"
FIGURES_EVERY = 2.0  # seconds: figures of an epoch under way cost a wait for the device


class RunLog:
    """Keeps one JSON object an epoch in `metrics.jsonl`, and tells the person watching.

    Args:
        folder: of the run.
        finished: epochs that the run has finished already; later lines, which a killed run may
            have left behind, are dropped.
        recovered: lines of finished epochs that a killed run may not have come to write.
        title: stands before every line for people.
        quiet: write files only.
        tensorboard: also write TensorBoard's event files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        finished: int = 0,
        recovered: Sequence[dict[str, Any]] = (),
        title: str = "",
        quiet: bool = False,
        tensorboard: bool = False,
    ) -> None:
        self.path = folder / METRICS_NAME
        self.title = title
        self.quiet = quiet
        self.writer = _make_writer(folder / "tensorboard", finished) if tensorboard else None
        self._work: Progress | None = None
        self._figured_at = 0.0
        lines = {line["epoch"]: line for line in (*read_metrics(self.path), *recovered)}
        kept = [json.dumps(lines[epoch]) + "\n" for epoch in sorted(lines) if epoch <= finished]
        write_atomically(self.path, "".join(kept).encode())

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Adds finished epochs to the files."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            if self.writer is not None:
                scalars = [(line["epoch"], *item) for line in lines for item in line.items()]
                for epoch, key, value in scalars:
                    if isinstance(value, int | float):
                        self.writer.add_scalar(key, value, epoch)
                self.writer.flush()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error

    def tell_epoch(self, metrics: dict[str, Any], total_epochs: int) -> None:
        """Tells the person watching of a finished epoch."""
        self._print(_sentence(self.title, metrics, total_epochs))

    def tell(self, sentence: str) -> None:
        """Tells the person watching, and nobody else."""
        self._print(f"{self.title}: {sentence}")

    def _print(self, line: str) -> None:
        if not self.quiet:
            say(line)

    @property
    def wants_figures(self) -> bool:
        """Whether somebody watches, and has seen no new figures for a while."""
        due = time.monotonic() - self._figured_at >= FIGURES_EVERY
        return due and self._work is not None and is_shown()

    @contextmanager
    def progress(self, done: int, total: int) -> Iterator[None]:
        """Shows how many batches of the whole run are done."""
        with progress(self.title, total, "batches", done) as self._work:
            try:
                yield
            finally:
                self._work = None

    def advance(self, done: int, epoch: str, figures: dict[str, float] | None = None) -> None:
        """So many batches are done; with figures of the epoch so far."""
        if self._work is None:
            return
        self._work.done = done
        now = f"epoch {epoch}"
        if figures is not None:
            self._figured_at = time.monotonic()
            now += f", loss {figures['loss']:.3f}"
            now += f", accuracy in training {figures['train_accuracy']:.1%}"
            if "macs_share" in figures:
                now += f", MACs {figures['macs_share']:.1%}"
        elif self._work.note.startswith(f"{now},"):
            return  # the last figures of this epoch still hold
        self._work.note = now


def _lines(path: Path) -> list[bytes]:
    try:
        return read_regular(path).splitlines() if path.is_file() else []
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl; lines that a kill or a power cut left damaged are left out."""
    path = Path(path)
    found = []
    for line in _lines(path):
        with contextlib.suppress(ValueError, RecursionError):
            metrics = json.loads(line)
            if isinstance(metrics, dict) and isinstance(metrics.get("epoch"), int):
                found.append(metrics)
    return found


def _make_writer(folder: Path, finished: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "train.tensorboard needs the package tensorboard: pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder), purge_step=finished + 1)


def _sentence(title: str, metrics: dict[str, Any], total_epochs: int) -> str:
    text = (
        f"{title} epoch {metrics['epoch']}/{total_epochs} ({metrics['stage']}): "
        f"loss {metrics['loss']:.3f}"
    )
    if "accuracy" in metrics:  # not every epoch is evaluated
        text += f", {'mean IoU' if 'iou' in metrics else 'accuracy'} {metrics['accuracy']:.2%}"
        if metrics["active"] < 1 or metrics["embedding_accuracy"] is not None:
            text += f", MACs {metrics['macs_share']:.1%}, active {metrics['active']:.1%}"
    if metrics.get("skipped_images"):
        text += f", {metrics['skipped_images']} images skipped"
    return text + f", {metrics['seconds']:.1f} s"
