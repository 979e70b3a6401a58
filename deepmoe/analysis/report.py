"""One self-contained page about a run and its dense twin."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import torch

import deepmoe
from deepmoe.analysis.plots import as_data_uri, gate_heatmap, loss_curves, macs_histogram
from deepmoe.config import RunConfig, config_to_toml
from deepmoe.costs import format_macs
from deepmoe.evaluation import Evaluation, GateRecord, SegmentationEvaluation

TABLE_HEADER = ("network", "accuracy", "mean MACs", "of dense MACs", "active channels")
EXITS_HEADER = "exit rate"


@dataclass(frozen=True)
class Contender:
    """One of the networks that a report compares."""

    name: str
    result: Evaluation | SegmentationEvaluation
    metrics: Sequence[dict[str, Any]]  # the lines of metrics.jsonl

    @property
    def row(self) -> tuple[str, ...]:
        """The network's line in the table, under TABLE_HEADER."""
        return (
            self.name,
            f"{self.result.accuracy:.2%}",
            format_macs(self.result.macs),
            f"{self.result.macs_share:.1%}",
            f"{self.result.active:.1%}",
        )

    @property
    def exited(self) -> float | None:
        """Share of the images that the embedding has answered; `None` without exits."""
        return self.result.exited if isinstance(self.result, Evaluation) else None


def comparison(contenders: Sequence[Contender]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table; exits have a column if one of the networks has some."""
    rows = [contender.row for contender in contenders]
    exits = [contender.exited for contender in contenders]
    if all(share is None for share in exits):
        return TABLE_HEADER, rows
    shown = ["-" if share is None else f"{share:.1%}" for share in exits]
    wider = [(*row, share) for row, share in zip(rows, shown, strict=True)]
    return (*TABLE_HEADER, EXITS_HEADER), wider


def write_report(
    path: str | Path,
    contenders: Sequence[Contender],
    record: GateRecord,
    config: RunConfig,
    evaluated_on: str,
) -> None:
    """Writes the page: table, loss curves, gate heat map, histogram of MACs, configuration.

    There is no heat map of a network without gates.
    """
    template = resources.files("deepmoe").joinpath("analysis", "report.html.j2").read_text("utf-8")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        template
    )
    header, rows = comparison(contenders)
    html = page.render(
        title=f"DeepMoE: {config.model.name} on {config.data.name}",
        header=header,
        rows=rows,
        exits=_told_exits(record),
        images=len(record.labels),
        evaluated_on=evaluated_on,
        curves=as_data_uri(loss_curves({c.name: c.metrics for c in contenders})),
        heatmap=as_data_uri(gate_heatmap(record)) if record.gates else None,
        histogram=as_data_uri(macs_histogram(record)),
        config=config_to_toml(config),
        version=deepmoe.__version__,
        torch_version=torch.__version__,
    )
    Path(path).write_text(html, encoding="utf-8")


def _told_exits(record: GateRecord) -> str | None:
    """How many images the embedding has answered, and how well; `None` without exits."""
    if record.exited is None:
        return None
    answered, images = int(record.exited.sum()), len(record.labels)
    if not answered:
        return f"The embedding has answered none of {images:,} images."
    right = (record.predictions == record.labels)[record.exited].mean()
    return (
        f"The embedding has answered {answered:,} of {images:,} images ({answered / images:.1%}), "
        f"{right:.2%} of them rightly."
    )
