"""Networks side by side in a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepmoe.costs import format_macs
from deepmoe.evaluation import Evaluation, SegmentationEvaluation

EXITS_HEADER = "exit rate"


@dataclass(frozen=True)
class Contender:
    """One of the networks that are compared."""

    name: str
    result: Evaluation | SegmentationEvaluation
    metrics: Sequence[dict[str, Any]] = ()  # the lines of metrics.jsonl

    @property
    def row(self) -> tuple[str, ...]:
        """The network's line in the table."""
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
    measure = contenders[0].result.measure
    header = ("network", measure, "mean MACs", "of dense MACs", "active channels")
    rows = [contender.row for contender in contenders]
    exits = [contender.exited for contender in contenders]
    if all(share is None for share in exits):
        return header, rows
    shown = ["-" if share is None else f"{share:.1%}" for share in exits]
    wider = [(*row, share) for row, share in zip(rows, shown, strict=True)]
    return (*header, EXITS_HEADER), wider
