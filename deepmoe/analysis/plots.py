"""Plots of a run. Figures are made without pyplot, so that nothing global is touched."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deepmoe.analysis.statistics import activity_by_class
from deepmoe.evaluation import GateRecord

MOST_CLASS_LABELS = 25


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
            label=f"{name}, training",
        )
        loss.plot(
            epochs,
            [m["evaluation_loss"] for m in evaluated],
            linestyle="--",
            color=loss.lines[-1].get_color(),
            label=f"{name}, evaluation",
        )
        accuracy.plot(epochs, [100 * m["accuracy"] for m in evaluated], label=name)
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


def gate_heatmap(record: GateRecord) -> Figure:
    """Share of channels that run, by class and layer."""
    table = 100 * activity_by_class(record)
    classes, layers = table.shape
    figure = Figure(
        figsize=(min(14, 3 + 0.45 * layers), min(12, 1.6 + 0.28 * classes)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(table, aspect="auto", vmin=0, vmax=100, cmap="viridis")
    figure.colorbar(image, label="active channels, %")
    axes.set_xticks(range(layers), record.layer_names, rotation=90, fontsize=7)
    if classes <= MOST_CLASS_LABELS:
        axes.set_yticks(range(classes), record.class_names, fontsize=8)
    axes.set(xlabel="gated convolution", ylabel="class")
    return figure


def macs_histogram(record: GateRecord) -> Figure:
    """How many images cost how much."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    millions = record.macs / 1e6
    axes.hist(millions, bins=40, color="tab:blue")
    axes.axvline(record.dense_macs / 1e6, color="tab:red", label="dense base network")
    axes.axvline(float(np.mean(millions)), color="black", linestyle="--", label="mean")
    axes.set(xlabel="million MACs an image", ylabel="images")
    axes.legend(fontsize=8)
    return figure


def cost_curve_plot(curves: Mapping[str, Sequence[dict[str, Any]]]) -> Figure:
    """Accuracy against the share of the dense MACs, for each named list of evaluations."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        shares = [100 * p["macs_share"] for p in points]
        axes.plot(shares, [100 * p["accuracy"] for p in points], marker="o", label=name)
    axes.set(xlabel="MACs, % of dense", ylabel="accuracy, %")
    axes.legend(fontsize=8)
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


MARKERS = "os^vDP*X<>ph"  # colours alone repeat after ten


def as_data_uri(figure: Figure) -> str:
    """The figure as an SVG image that can stand inside a page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
