"""The tables of docs/compare.md."""

from result_files import experiment, origin

from deepmoe.compare import METHODS
from deepmoe.comparison.table import HEADER, table_cells
from deepmoe.results import markdown_table

SMALL = "compare_small/table"
LEFT_OUT = ("schedule", "CPU latency, of dense")  # of one schedule, and not measured there


def methods_table() -> str:
    """All methods, by their names."""
    rows = [
        (f"`{m.name}`", m.title, m.source, "each image" if m.dynamic else "all images")
        for m in METHODS
    ]
    return markdown_table(["name", "method", "published by", "chooses channels for"], rows)


def small_table() -> str:
    """All methods at one cost, on a small scale; the best first."""
    found = experiment(SMALL)
    titles = {method.name: method.title for method in METHODS}
    best_first = [
        {**line, "title": titles.get(line["method"], line["title"])}
        for line in sorted(found["values"], key=lambda line: -line["accuracy"])
    ]
    shown = [i for i, title in enumerate(HEADER) if title not in LEFT_OUT]
    rows = [[cells[i] for i in shown] for cells in table_cells(best_first)]
    return f"{markdown_table([HEADER[i] for i in shown], rows)}\n\n{origin(found)}"
