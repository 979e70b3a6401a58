"""Plots of gates: what classes run, how routes repeat, what shuffling does, what networks weigh."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from deepmoe.analysis.names import file_size, in_plot, readable_layers
from deepmoe.analysis.plots import ACCENT, CONTRAST, PALE, new_figure
from deepmoe.analysis.statistics import activity_by_class, experts_by_class
from deepmoe.evaluation import GateRecord
from deepmoe.evaluation.memory import Memory
from deepmoe.evaluation.routes import Routes
from deepmoe.evaluation.shuffling import Shuffling

MOST_LABELS = 60  # of classes or layers, that still can be read


def gate_heatmap(record: GateRecord) -> Figure:
    """Share of channels that run, by class and layer."""
    rows = record.class_names if record.labels is not None else ("all images",)
    table = 100 * activity_by_class(record)
    columns = readable_layers(record.layer_names)
    return _heatmap(table, rows, columns, "active channels, %")


def expert_heatmap(record: GateRecord) -> Figure:
    """Which experts run for which classes."""
    table = 100 * experts_by_class(record)
    columns = [f"expert {number + 1}" for number in range(table.shape[1])]
    return _heatmap(table, record.class_names, columns, "images of the class, %")


def shuffling_heatmap(shuffling: Shuffling) -> Figure:
    """Accuracy of each class under gates of each other one."""
    names = shuffling.class_names
    order = np.arange(len(names))
    if shuffling.groups is not None:  # classes of one category side by side
        order = np.lexsort((names, shuffling.groups))
    table = 100 * shuffling.accuracy[np.ix_(order, order)]
    labels = [names[number] for number in order]
    figure = _heatmap(table, labels, labels, "accuracy, %")
    figure.axes[0].set(xlabel="class that the gates came from", ylabel="class of the image")
    return figure


def layer_plot(routes: Routes) -> Figure:
    """How many channels of each layer run always, for some images, or never."""
    names = readable_layers([layer.name for layer in routes.layers])
    figure, axes = new_figure(8, max(1.6, 0.9 + 0.2 * len(names)))
    always = np.array([layer.always / max(1, layer.channels) for layer in routes.layers])
    never = np.array([layer.never / max(1, layer.channels) for layer in routes.layers])
    places, some = np.arange(len(names)), 1 - always - never
    for share, left, colour, told in (
        (always, 0 * always, ACCENT, "for all images"),
        (some, always, "#93c5fd", "for some"),
        (never, always + some, PALE, "for none"),
    ):
        axes.barh(places, 100 * share, left=100 * left, color=colour, label=told, height=0.8)
    axes.set_yticks(places, [in_plot(name) for name in names], fontsize=8)
    axes.set(xlabel="channels that run, %", xlim=(0, 100))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return figure


def channel_plot(names: Sequence[str], ran: Sequence[Sequence[bool]]) -> Figure:
    """Which channels of each layer ran for an image: a strip for each layer, a cell a channel.

    Args:
        names: of the layers, as people read them.
        ran: for each layer, whether each of its channels did.
    """
    figure, axes = new_figure(7.6, max(1.2, 0.5 + 0.22 * len(names)))
    colours = ListedColormap([PALE, ACCENT])
    for place, channels in enumerate(ran):
        strip = np.array([channels], dtype=float)
        extent = (0, 1, place + 0.4, place - 0.4)
        axes.imshow(
            strip, cmap=colours, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="none"
        )
        told = f"{int(strip.sum())} of {strip.size}"
        axes.text(1.01, place, told, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), [in_plot(name) for name in names], fontsize=8)
    axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5), xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


def repeats_plot(routes: Routes) -> Figure:
    """How many images take each route, the commonest first."""
    figure, axes = new_figure(7, 2.8)
    axes.bar(np.arange(1, routes.distinct + 1), routes.counts, color=ACCENT, width=1.0)
    axes.set(
        xlabel="route, the commonest first", ylabel="images", xlim=(0.5, routes.distinct + 0.5)
    )
    return figure


def shuffling_plot(shuffling: Shuffling) -> Figure:
    """Accuracy of each class under its own gates and under those of others."""
    classes = [shuffling.of_class(name) for name in shuffling.class_names]
    classes = sorted((c for c in classes if c.images), key=lambda c: -(c.shuffled or 0))
    figure, axes = new_figure(max(7, 0.11 * len(classes)), 3.2)
    places = np.arange(len(classes))
    series = [("own gates", [c.own for c in classes], "black", "_")]
    if shuffling.groups is None:
        series.append(("gates of other classes", [c.shuffled for c in classes], ACCENT, "o"))
    else:
        series.append(("of the same category", [c.in_group for c in classes], ACCENT, "o"))
        series.append(("of other categories", [c.out_of_group for c in classes], CONTRAST, "v"))
    for told, values, colour, marker in series:
        heights = [math.nan if value is None else 100 * value for value in values]
        axes.scatter(places, heights, label=told, color=colour, marker=marker, s=36)
    _label(axes.set_xticks, [c.name for c in classes], rotation=90)
    axes.set(ylabel="accuracy, %", ylim=(-3, 103))
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    axes.grid(alpha=0.3, axis="y")
    return figure


def class_shuffling_plot(shuffling: Shuffling, name: str) -> Figure:
    """Accuracy of one class under gates of each other one, the best first."""
    row = shuffling.class_names.index(name)
    accuracy = 100 * shuffling.accuracy[row]
    order = [i for i in np.argsort(-np.nan_to_num(accuracy, nan=-1.0)) if not np.isnan(accuracy[i])]
    groups = shuffling.groups
    alike = [groups is not None and groups[i] == groups[row] for i in order]
    figure, axes = new_figure(max(7, 0.11 * len(order)), 3.2)
    colours = [CONTRAST if same else PALE if groups else ACCENT for same in alike]
    axes.bar(np.arange(len(order)), accuracy[order], color=colours, width=0.85)
    own = shuffling.of_class(name).own
    if own is not None:
        axes.axhline(100 * own, color="black", linestyle="--", label="own gates")
    if groups is not None:
        axes.bar([0], [0], color=CONTRAST, label=f"gates of {in_plot(groups[row])}")
        axes.bar([0], [0], color=PALE, label="gates of other categories")
    _label(axes.set_xticks, [shuffling.class_names[i] for i in order], rotation=90)
    axes.set(ylabel=f"accuracy of {in_plot(name)}, %", ylim=(0, 103))
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return figure


def memory_plot(memory: Memory) -> Figure:
    """Measured bytes of each way to keep the network."""
    variants = memory.variants
    figure, axes = new_figure(7, 1.1 + 0.5 * len(variants))
    places = np.arange(len(variants))
    files = [variant.file_bytes for variant in variants]
    peaks = [variant.peak_bytes for variant in variants]
    axes.barh(places - 0.2, files, height=0.36, color=ACCENT, label="file")
    axes.barh(places + 0.2, peaks, height=0.36, color=PALE, label="peak, running one image")
    for place, (size, peak) in enumerate(zip(files, peaks, strict=True)):
        axes.text(size, place - 0.2, f" {file_size(size)}", va="center", fontsize=8)
        axes.text(peak, place + 0.2, f" {file_size(peak)}", va="center", fontsize=8)
    axes.set_yticks(places, [variant.name for variant in variants])
    axes.set_xlim(0, 1.18 * max(*files, *peaks))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    return figure


def _heatmap(table: np.ndarray, rows: Sequence[str], columns: Sequence[str], label: str) -> Figure:
    width, height = min(12, 3.2 + 0.3 * len(columns)), min(10, max(2.8, 1.9 + 0.2 * len(rows)))
    figure, axes = new_figure(max(6, width), height)
    image = axes.imshow(table, aspect="auto", vmin=0, vmax=100, cmap="viridis")
    figure.colorbar(image, label=label, pad=0.02, aspect=25, shrink=min(1.0, 3.5 / height))
    _label(axes.set_xticks, columns, rotation=90)
    _label(axes.set_yticks, rows)
    return figure


def _label(setter: Any, names: Sequence[str], **style: Any) -> None:
    """Names at a plot's axis: all of them, or every so manieth where there are too many."""
    step = -(-len(names) // (2 * MOST_LABELS))
    size = 8 if len(names) <= MOST_LABELS else 6
    shown = range(0, len(names), step)
    setter(list(shown), [in_plot(names[i]) for i in shown], fontsize=size, **style)
