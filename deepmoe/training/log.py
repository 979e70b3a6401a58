"""The log of a run: metrics.jsonl for programs, a progress bar or plain lines for people."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepmoe.training.checkpoint import write_atomically


class RunLog:
    """Appends one JSON object an epoch to `metrics.jsonl`, and tells the person watching.

    Args:
        path: the JSONL file.
        finished: epochs that the run has finished already; later lines, which a killed run may
            have left behind, are dropped.
        title: stands before every line for people.
        quiet: write the file only.
    """

    def __init__(self, path: Path, *, finished: int = 0, title: str = "", quiet: bool = False):
        self.path = path
        self.title = title
        self.quiet = quiet
        self.console = Console(soft_wrap=True)
        kept = [line for line in read_metrics(path) if line["epoch"] <= finished]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def write(self, metrics: dict[str, Any], total_epochs: int) -> None:
        """Logs a finished epoch."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        if not self.quiet:
            self.console.print(_sentence(self.title, metrics, total_epochs), highlight=False)

    @contextmanager
    def progress(self, batches: Iterable[Any], count: int, label: str) -> Iterator[Iterable[Any]]:
        """Shows a progress bar while batches are used, where a terminal is watching."""
        if self.quiet or not self.console.is_terminal:
            yield batches
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield progress.track(batches, total=count, description=f"{self.title} {label}")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl; a last line cut short by a kill is left out."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _sentence(title: str, metrics: dict[str, Any], total_epochs: int) -> str:
    text = (
        f"{title} epoch {metrics['epoch']}/{total_epochs} ({metrics['stage']}): "
        f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.2%}"
    )
    if metrics["embedding_accuracy"] is not None:
        text += f", MACs {metrics['macs_share']:.1%}, active {metrics['active']:.1%}"
    return text + f", {metrics['seconds']:.1f} s"
