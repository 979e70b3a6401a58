"""The tables of docs/compare.md."""

from collections.abc import Mapping
from typing import Any

from result_files import experiment, origin

from deepmoe.compare import METHODS
from deepmoe.comparison.table import HEADER, table_cells
from deepmoe.costs import format_macs
from deepmoe.results import markdown_table

SMALL = "compare_small/table"
FULL_SIZE = "compare_cifar100/vgg16"
# File, row, network as the paper calls it, and the accuracy that its authors report.
PUBLISHED = (
    ("vgg16_li", "li_published-vgg16-a", "VGG-16-A", 0.9340),
    ("resnet56_li", "li_published-resnet56-b", "ResNet-56-B", 0.9306),
    ("resnet56_he", "he-50", "ResNet-56 at half", 0.918),
    ("vgg19_slimming", "slimming-49", "VGG-19, 70 % of the channels pruned", 0.9380),
)
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


def published_table() -> str:
    """CIFAR-10: networks of the papers, beside what their authors report."""
    rows, results = [], []
    for file, run, network, published in PUBLISHED:
        found = experiment(f"compare_cifar10/{file}")
        results.append(found)
        line = {line["run"]: line for line in found["values"]}
        own, start = line[run], line["start"]
        rows.append(
            (
                own["title"],
                network,
                format_macs(own["macs"]),
                own["epochs"],
                f"{start['accuracy']:.2%}",
                f"{own['accuracy']:.2%}",
                f"{published:.2%}",
                f"{100 * (own['accuracy'] - published):+.2f}",
            )
        )
    header = ("method", "network", "MACs", "epochs", "start", "ours", "published", "difference")
    return f"{markdown_table(header, rows)}\n\n{origin(*results)}"


def full_size_table() -> str:
    """CIFAR-100, vgg16: accuracy of all methods at each cost."""
    found = experiment(FULL_SIZE)
    lines = {(line["method"], line["share"]): line for line in found["values"]}
    shares = sorted({share for _, share in lines if share < 1}, reverse=True)
    rows = []
    for method in METHODS:
        # What has one cost, the whole network's, stands in the first column.
        costs = [1.0] if method.one_cost else shares
        own = [line for share in costs if (line := lines.get((method.name, share))) is not None]
        if own:
            told = [_accuracy(lines.get((method.name, share))) for share in costs]
            padding = [""] * (len(shares) - len(told))
            rows.append((method.title, own[0]["epochs"], *told, *padding))
    rows.sort(key=lambda row: row[2], reverse=True)
    header = ["method", "epochs", *(f"{share:.0%} of the MACs" for share in shares)]
    return f"{markdown_table(header, rows)}\n\n{origin(found)}"


def full_size_rows() -> str:
    """The same with everything that was measured, a row for each cost."""
    found = experiment(FULL_SIZE)
    best_first = sorted(found["values"], key=lambda line: (-line["share"], -line["accuracy"]))
    shown = [i for i, title in enumerate(HEADER) if title not in ("schedule", "chooses for")]
    rows = [[cells[i] for i in shown] for cells in table_cells(best_first)]
    return f"{markdown_table([HEADER[i] for i in shown], rows)}\n\n{origin(found)}"


def _accuracy(line: Mapping[str, Any] | None) -> str:
    """With the number of seeds, where it is of several."""
    if line is None:
        return ""
    seeds = f" ({line['seeds']})" if line["seeds"] > 1 else ""
    return f"{line['accuracy']:.1%}{seeds}"
