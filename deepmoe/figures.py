"""Figures that results draw of themselves. Without pyplot, so that nothing global is touched."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepmoe.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bars(
    values: Mapping[str, float], label: str, title: str = "", shown: str = "{:.1f}"
) -> "Figure":
    """One bar for each value, the first on top.

    Args:
        values: by name.
        label: what is measured, and in what.
        title: of the figure.
        shown: how a value is written at its bar.
    """
    figure = empty_figure((7, 1 + 0.35 * max(2, len(values))))
    axes = figure.subplots()
    drawn = axes.barh(range(len(values)), list(values.values()), color="tab:blue")
    axes.bar_label(drawn, [shown.format(value) for value in values.values()], padding=3, fontsize=8)
    # As text: a class may be called $x$, which would be taken for mathematics.
    axes.set_yticks(range(len(values)), list(values), fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=9, parse_math=False)
    return figure


def empty_figure(size: tuple[float, float]) -> "Figure":
    """A figure to draw on, of so many inches."""
    require("report", "matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")
