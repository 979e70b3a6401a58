"""From the results of runs to rows: means over seeds, ours beside the paper's."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from deepmoe.costs import format_macs
from deepmoe.paper.page import MOST, Column, Line, Row, Shown

NONE = "-"  # where the paper, or a run that is not finished, has no figure
SPREAD = 0.01  # of the MACs: where seeds differ by less, their deviation is not shown


def line_of(row: Row, figures: Sequence[Mapping[str, Any]]) -> Line:
    """A row with means and deviations over the seeds that are done.

    Args:
        row: of a page.
        figures: of each of its finished runs.
    """
    line: Line = {
        "row": row.title,
        "labels": dict(row.labels),
        "curve": row.curve,
        "runs": list(row.runs),
    }
    line |= {"seeds": len(figures), "paper": dict(row.paper)}
    numbers = [k for k in (figures[0] if figures else ()) if _is_number(figures[0][k])]
    for key in numbers:
        values = [f[key] for f in figures if _is_number(f.get(key))]
        line[key] = statistics.fmean(values)
        if len(values) > 1:
            line[f"{key}_deviation"] = statistics.stdev(values)
    line["difference"] = {
        key: line[key] - theirs for key, theirs in row.paper.items() if key in line
    }
    return line


def run_figures(last: Mapping[str, Any]) -> Line:
    """The figures of a run, of its last epoch: errors and shares in percent.

    Raises:
        KeyError, TypeError, ValueError: for what anybody may have changed to something else.
    """
    for key, least, most in (
        ("accuracy", 0, 1),
        ("active", 0, 1),
        ("macs", 0, MOST),
        ("dense_macs", 1, MOST),
    ):
        if not (_is_number(last[key]) and least <= last[key] <= most):  # which nan is not
            raise ValueError(f"{key} can't be {last[key]!r}")
    for name, iou in last.get("iou", {}).items():
        if iou is not None and not (_is_number(iou) and 0 <= iou <= 1):
            raise ValueError(f"iou of {name} can't be {iou!r}")
    share = 100 * last["macs"] / last["dense_macs"]
    return {
        "accuracy": 100 * last["accuracy"],
        "error": 100 - 100 * last["accuracy"],
        "macs": last["macs"],
        "share": share,
        "reduction": 100 - share,
        "active": 100 * last["active"],
        "seconds": last.get("seconds"),
    }


def shown(
    title: str, columns: Sequence[Column], lines: Sequence[Line], *, compared: bool = True
) -> Shown:
    """The table for people: for each figure ours, and the paper's where it has some.

    Args:
        title: of the table.
        columns: of figures.
        lines: the rows.
        compared: whether to show differences as well: between other schedules and other data they
            say nothing.
    """
    header = list(dict.fromkeys(label for line in lines for label in line["labels"]))
    parts = [[line["labels"].get(label, "") for line in lines] for label in header]
    for column in columns:
        theirs = any(column.key in line["paper"] for line in lines)
        if not theirs and not any(column.key in line for line in lines):
            continue  # nobody has a figure
        header.append(column.title)
        parts.append([_ours(line, column) for line in lines])
        if not theirs:
            continue
        header.append(f"{column.title}, paper")
        parts.append([_cell(line["paper"].get(column.key), column.unit) for line in lines])
        if compared and column.compared:
            header.append(f"{column.title}, difference")
            parts.append([_difference(line["difference"].get(column.key)) for line in lines])
    header.append("seeds")
    parts.append([str(line["seeds"]) if line["seeds"] else NONE for line in lines])
    return Shown(title, tuple(header), tuple(zip(*parts, strict=True)))


def _ours(line: Line, column: Column) -> str:
    value, deviation = line.get(column.key), line.get(f"{column.key}_deviation")
    cell = _cell(value, column.unit)
    if value is None or deviation is None:
        return cell
    if column.unit == "%":
        return f"{cell} ± {deviation:.2f}"
    if column.unit == "MACs" and deviation > SPREAD * value:
        return f"{cell} ± {_cell(deviation, column.unit)}"
    return cell


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return NONE
    if unit == "%":
        return f"{value:.2f} %"
    if unit == "points":
        return f"{value:.2f}"
    if unit == "MACs":
        return format_macs(value)
    if unit == "bytes":
        return f"{value / 2**20:.2f} MiB"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _difference(value: float | None) -> str:
    return NONE if value is None else f"{value:+.2f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
