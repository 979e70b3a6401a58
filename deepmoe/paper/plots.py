"""Plots of tables and figures: ours as filled points, the paper's hollow, or as dotted lines."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deepmoe.analysis.plots import MARKERS, new_figure
from deepmoe.paper.page import Line, Made


def against_macs(
    made: Made, key: str = "error", title: str = "error, %", panel: str = ""
) -> Figure:
    """A figure of each row against its MACs; rows of one curve are joined.

    Args:
        made: the rows.
        key: the figure.
        title: of its axis.
        panel: a label whose values have a plot each, side by side.
    """
    panels = list(dict.fromkeys(line["labels"].get(panel, "") for line in made.lines))
    figure = Figure(figsize=(9 + 3.5 * (len(panels) - 1), 5), layout="constrained")
    curves = list(dict.fromkeys(_curve(line, panel) for line in made.lines))
    styles: dict[str, dict[str, Any]] = {
        name: {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)]}
        for number, name in enumerate(curves)
    }
    for axes, value in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        lines = [line for line in made.lines if line["labels"].get(panel, "") == value]
        _points(axes, lines, styles, key, panel)
        axes.set(xlabel="mean MACs an image, millions", ylabel=title, title=value)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    told: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            told.setdefault(name, handle)
    figure.legend(told.values(), told, loc="outside right upper", fontsize=8)
    return figure


def _curve(line: Line, panel: str) -> str:
    name = line["curve"] or line["row"]
    return name.removeprefix(f"{line['labels'].get(panel, '')}, ")


def _points(
    axes: Axes, lines: Sequence[Line], styles: dict[str, dict[str, Any]], key: str, panel: str
) -> None:
    for name, style in styles.items():
        points = [line for line in lines if _curve(line, panel) == name]
        ours = sorted((p["macs"], p[key]) for p in points if key in p)
        if ours:
            axes.plot([x / 1e6 for x, _ in ours], [y for _, y in ours], label=name, **style)
        theirs = sorted(
            (p["paper"]["macs"], p["paper"][key])
            for p in points
            if key in p["paper"] and "macs" in p["paper"]
        )
        if theirs:
            x, y = [x / 1e6 for x, _ in theirs], [y for _, y in theirs]
            axes.plot(x, y, linestyle=":", fillstyle="none", label=f"{name}, paper", **style)
        # Without its MACs, a figure has no place from left to right.
        heights = {p["paper"].get(key) for p in points if "macs" not in p["paper"]} - {None}
        for height in sorted(heights):
            line: dict[str, Any] = {"linestyle": ":", "linewidth": 1, "color": style["color"]}
            axes.axhline(height, label="paper, in the colour of its row: MACs not given", **line)


def bars(lines: Sequence[Line], keys: dict[str, str], unit: str) -> Figure:
    """Some figures of each row side by side, by their titles; the paper's as outlines."""
    figure, axes = new_figure(max(6, 1.2 * len(lines)), 4.5)
    width = 0.8 / len(keys)
    for number, (key, title) in enumerate(keys.items()):
        places = [place + number * width for place in range(len(lines))]
        heights = [line.get(key, float("nan")) for line in lines]
        axes.bar(places, heights, width, label=title, color=f"C{number}")
        theirs = [line["paper"].get(key, float("nan")) for line in lines]
        if any(key in line["paper"] for line in lines):
            outline: dict[str, Any] = {"fill": False, "edgecolor": "black", "linestyle": ":"}
            axes.bar(places, theirs, width, label=f"{title}, paper", **outline)
    middle = 0.4 - width / 2
    names = [line["row"] for line in lines]
    axes.set_xticks([p + middle for p in range(len(lines))], names, rotation=30, ha="right")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
    return figure
