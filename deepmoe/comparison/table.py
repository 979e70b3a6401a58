"""The table of a comparison: a row for each method and cost, means over seeds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from deepmoe.bench.latency import Latency
from deepmoe.comparison.asked import Row
from deepmoe.comparison.measure import Measured
from deepmoe.costs import format_macs

HEADER = (
    "method",
    "chooses for",
    "schedule",
    "epochs",
    "of dense MACs",
    "accuracy",
    "mean MACs",
    "parameters",
    "time to prune",
    "CPU latency, of dense",
    "seeds",
)


def comparison_table(
    rows: Sequence[Row],
    measured: Mapping[str, Sequence[Measured]],
    latencies: Mapping[str, Latency],
) -> list[dict[str, Any]]:
    """Figures of each row that has some, as plain values.

    Args:
        rows: of the comparison.
        measured: figures of each seed, by the row's name.
        latencies: of rows, by name.
    """
    table = []
    for row in rows:
        found = measured.get(row.name, ())
        if not found:
            continue
        accuracies = [m.accuracy for m in found]
        seconds = [m.prune_seconds for m in found if m.prune_seconds is not None]
        latency = latencies.get(row.name)
        table.append(
            {
                "run": row.name,
                "method": row.method.name,
                "title": row.method.title,
                "source": row.method.source,
                "dynamic": row.method.dynamic,
                "published": row.published,
                "share": row.share,
                "epochs": row.epochs,
                "seeds": len(found),
                "accuracy": statistics.fmean(accuracies),
                "accuracy_deviation": statistics.stdev(accuracies) if len(found) > 1 else None,
                "macs": statistics.fmean(m.macs for m in found),
                "macs_share": statistics.fmean(m.macs_share for m in found),
                "parameters": statistics.fmean(m.parameters for m in found),
                "prune_seconds": statistics.fmean(seconds) if seconds else None,
                "exited": None if found[0].exited is None else _mean_exited(found),
                "latency_ratio": None if latency is None else latency.ratio,
                "latency_images": None if latency is None else latency.images,
                "threads": None if latency is None else latency.threads,
                "evaluated_on": found[0].evaluated_on,
            }
        )
    return table


def _mean_exited(found: Sequence[Measured]) -> float:
    return statistics.fmean(m.exited or 0.0 for m in found)


def table_cells(table: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The table for people, under `HEADER`."""
    return [
        (
            line["title"],
            "each image" if line["dynamic"] else "all images",
            "authors'" if line["published"] else "common",
            str(line["epochs"]),
            f"{line['macs_share']:.1%}",
            _with_spread(line["accuracy"], line["accuracy_deviation"]),
            format_macs(line["macs"]),
            f"{line['parameters'] / 1e6:.2f} M",
            "" if line["prune_seconds"] is None else f"{line['prune_seconds']:.0f} s",
            "" if line["latency_ratio"] is None else f"{line['latency_ratio']:.2f}",
            str(line["seeds"]),
        )
        for line in table
    ]


def _with_spread(accuracy: float, deviation: float | None) -> str:
    return f"{accuracy:.2%}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")
