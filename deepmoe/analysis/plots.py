"""Plots of a run. Figures are made without pyplot, so that nothing global is touched."""

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deepmoe.analysis.names import in_plot
from deepmoe.evaluation import GateRecord

ACCENT, CONTRAST, PALE = "#2563eb", "#dc2626", "#cbd5e1"


def can_be_drawn(metrics: Sequence[dict[str, Any]]) -> bool:
    """Whether lines of a metrics.jsonl, which anybody may have changed, hold a curve."""

    def good(line: dict[str, Any]) -> bool:
        numbers = ["task_loss", *(("accuracy", "evaluation_loss") if "accuracy" in line else ())]
        return "stage" in line and all(isinstance(line.get(key), int | float) for key in numbers)

    return bool(metrics) and all(map(good, metrics))


def loss_curves(runs: Mapping[str, Sequence[dict[str, Any]]]) -> Figure:
    """Task loss in training and accuracy in evaluation, for each named run."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    frozen: list[int] = []
    for name, metrics in runs.items():
        evaluated = [m for m in metrics if "accuracy" in m]
        epochs = [m["epoch"] for m in evaluated]
        loss.plot(
            [m["epoch"] for m in metrics],
            [m["task_loss"] for m in metrics],
            label=f"{in_plot(name)}, training",
        )
        loss.plot(
            epochs,
            [m["evaluation_loss"] for m in evaluated],
            linestyle="--",
            color=loss.lines[-1].get_color(),
            label=f"{in_plot(name)}, evaluation",
        )
        accuracy.plot(epochs, [100 * m["accuracy"] for m in evaluated], label=in_plot(name))
        frozen += [m["epoch"] for m in metrics if m["stage"] == "finetune"]
    for axes in (loss, accuracy):
        if frozen:
            axes.axvspan(min(frozen) - 0.5, max(frozen) + 0.5, color="0.93", zorder=0)
        axes.set_xlabel("epoch (grey: embedding and gates frozen)" if frozen else "epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    loss.set(ylabel="cross-entropy", yscale="log")
    accuracy.set_ylabel("accuracy, %")
    return figure


def macs_histogram(record: GateRecord) -> Figure:
    """How many images cost how much."""
    figure, axes = new_figure(7, 2.8)
    shares = 100 * record.macs / record.dense_macs
    axes.hist(shares, bins=40, color=ACCENT)
    axes.axvline(100, color=CONTRAST, label="dense base network")
    axes.axvline(float(np.mean(shares)), color="black", linestyle="--", label="mean")
    axes.set(xlabel="MACs of an image, % of dense", ylabel="images")
    axes.legend(fontsize=8, frameon=False)
    return figure


def cost_curve_plot(
    curves: Mapping[str, Sequence[dict[str, Any]]],
    points: Mapping[str, tuple[float, float]] | None = None,
    measure: str = "accuracy",
    *,
    log: bool = False,
) -> Figure:
    """Accuracy against the share of the dense MACs.

    Args:
        curves: evaluations of one model at several costs, by name.
        points: single models by name: share of the dense MACs, and accuracy.
        measure: what accuracy is called.
        log: shares on a logarithmic scale, for curves that go down to a few percent.
    """
    many = len(curves) > MANY
    figure, axes = new_figure(7 if many else 5, 3.2)
    for name, line in curves.items():
        shares = [100 * p["macs_share"] for p in line]
        axes.plot(shares, [100 * p["accuracy"] for p in line], marker="o", label=in_plot(name))
    for number, (name, (share, accuracy)) in enumerate((points or {}).items()):
        where = ([100 * share], [100 * accuracy])
        style = {"marker": MARKERS[2 + number % 10], "s": 80, "zorder": 3}
        axes.scatter(*where, label=in_plot(name), color=f"C{(number + 1) % 10}", **style)
    axes.set(xlabel="MACs, % of dense", ylabel=f"{measure}, %")
    if points:
        axes.set_xlim(left=0)
    if log:
        axes.set_xscale("log")
        axes.set_xticks(LOG_TICKS, [str(tick) for tick in LOG_TICKS])
        axes.minorticks_off()
        shares = [100 * p["macs_share"] for line in curves.values() for p in line]
        axes.set_xlim(0.9 * min(shares), 1.1 * max(shares))
    if many:
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    else:
        axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.3)
    return figure


def comparison_plot(table: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy against cost of the methods of a comparison, a curve each.

    Args:
        table: rows as `deepmoe.comparison` gives them. What chooses for each image is dashed.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys((row["title"], row["published"]) for row in table))
    for number, (title, published) in enumerate(names):
        rows = [row for row in table if (row["title"], row["published"]) == (title, published)]
        rows.sort(key=lambda row: row["macs_share"])
        axes.plot(
            [100 * row["macs_share"] for row in rows],
            [100 * row["accuracy"] for row in rows],
            linestyle="--" if rows[0]["dynamic"] else "-",
            marker=MARKERS[number % len(MARKERS)],
            color=f"C{number % 10}",
            label=f"{title}, published schedule" if published else title,
        )
    axes.set(xlabel="mean MACs, % of dense", ylabel="accuracy, %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)  # there may be twenty curves
    return figure


MANY = 6  # curves, that leave no room for their names among them
LOG_TICKS = (1, 2, 3, 6, 12, 25, 50, 100)  # percent of the dense MACs
MARKERS = "os^vDP*X<>ph"  # colours alone repeat after ten


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure with one plot, without a frame at its upper and right side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def as_data_uri(figure: Figure) -> str:
    """The figure as an SVG image that can stand inside a page."""
    return data_uri(drawn(figure, "svg"), "svg+xml")


def data_uri(content: bytes, kind: str) -> str:
    """An image file as what can stand inside a page."""
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def drawn(figure: Figure, kind: str) -> bytes:
    """The figure as a file, `svg` or `png`, the same at every run."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "deepmoe"}):
        warnings.filterwarnings("ignore", "Glyph")  # names in scripts that the font lacks
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(buffer, format=kind, dpi=120, metadata=metadata)
    return buffer.getvalue()
