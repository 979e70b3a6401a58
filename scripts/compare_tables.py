"""The tables of docs/compare.md."""

import math
from collections.abc import Mapping
from typing import Any

from result_files import EXPERIMENTS, experiment, origin

from deepmoe.compare import METHODS
from deepmoe.comparison.table import HEADER, table_cells
from deepmoe.costs import format_macs
from deepmoe.results import markdown_table

SMALL = "compare_small/table"
# Folders: files of runs with other seeds, or other rows.
VGG16, RESNET56 = "compare_cifar100/vgg16", "compare_cifar100/resnet56"
DRAWN = {  # methods that can be told apart in one plot, with short names
    "thin-long": "thin, 76 epochs",
    "thin": "thin, 38 epochs",
    "ours-exits": "ours, exits",
    "ours": "ours, pruned",
    "he": "He",
    "fbs": "FBS",
    "hard-moe": "Hard MoE",
    "rnp": "RNP",
}
SEEDS = 3  # that are asked for; what was trained beyond them is left out
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


def full_size_table(folder: str) -> str:
    """CIFAR-100: accuracy of all methods at each cost."""
    lines = {(line["method"], line["share"]): line for line in pooled(folder)}
    shares = sorted({share for _, share in lines if share < 1}, reverse=True)
    rows = []
    for method in METHODS:
        # What has one cost, the whole network's, stands in the first column.
        costs = [1.0] if method.one_cost else shares
        own = [line for share in costs if (line := lines.get((method.name, share))) is not None]
        if own:
            told = [_accuracy(lines.get((method.name, share))) for share in costs]
            padding = [""] * (len(shares) - len(told))
            rows.append((own[0]["accuracy"], method.title, own[0]["epochs"], *told, *padding))
    rows.sort(key=lambda row: row[0], reverse=True)
    header = ["method", "epochs", *(f"{share:.0%} of the MACs" for share in shares)]
    table = markdown_table(header, [row[1:] for row in rows])
    return f"{table}\n\n{_origin(folder)}"


def full_size_rows(folder: str) -> str:
    """The same with everything that was measured, a row for each cost."""
    best_first = sorted(pooled(folder), key=lambda line: (-line["share"], -line["accuracy"]))
    shown = [i for i, title in enumerate(HEADER) if title not in ("schedule", "chooses for")]
    rows = [[cells[i] for i in shown] for cells in table_cells(best_first)]
    return f"{markdown_table([HEADER[i] for i in shown], rows)}\n\n{_origin(folder)}"


def full_size_curves() -> dict[str, list[dict[str, Any]]]:
    """Some of vgg16's as curves."""
    lines = sorted(pooled(VGG16), key=lambda line: line["macs_share"])
    return {
        title: [line for line in lines if line["method"] == method]
        for method, title in DRAWN.items()
    }


def parts(folder: str) -> list[dict[str, Any]]:
    """The files of a comparison that was trained in several runs."""
    paths = sorted((EXPERIMENTS / folder).glob("*.json"))
    return [experiment(f"{folder}/{path.stem}") for path in paths]


def _origin(folder: str) -> str:
    """Of all files; their commands are in them, and would fill a page."""
    return origin(*({**part, "command": "", "note": ""} for part in parts(folder)))


def pooled(folder: str) -> list[dict[str, Any]]:
    """Its rows, each over the seeds of all files, with the latency that any of them has."""
    found: dict[str, dict[str, Any]] = {}
    timed: dict[str, float] = {}
    for line in (line for part in parts(folder) for line in part["values"]):
        before = found.get(line["run"])
        if before is None:
            found[line["run"]] = line
        elif before["seeds"] + line["seeds"] <= SEEDS:
            found[line["run"]] = _both(before, line)
        if line["latency_ratio"] is not None:
            timed.setdefault(line["run"], line["latency_ratio"])
    for line in found.values():  # networks of one shape have one latency, whoever chose it
        if line["run"] in timed and not line["dynamic"]:
            timed.setdefault(_shape(line), timed[line["run"]])
    return [
        {**line, "latency_ratio": timed.get(line["run"], timed.get(_shape(line)))}
        for line in found.values()
    ]


def _shape(line: Mapping[str, Any]) -> str:
    """Pruned networks of equal cost and size have the same widths; dynamic ones are of no shape."""
    return line["run"] if line["dynamic"] else f"{line['macs']:.0f} {line['parameters']:.0f}"


def _both(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """One row of two, with the mean and the deviation of all seeds."""
    n = a["seeds"] + b["seeds"]
    known = [key for key in MEANS if a[key] is not None and b[key] is not None]
    means = {key: (a["seeds"] * a[key] + b["seeds"] * b[key]) / n for key in known}
    squares = sum(
        (line["seeds"] - 1) * (line["accuracy_deviation"] or 0) ** 2
        + line["seeds"] * (line["accuracy"] - means["accuracy"]) ** 2
        for line in (a, b)
    )
    return {**a, **means, "seeds": n, "accuracy_deviation": math.sqrt(squares / (n - 1))}


def _accuracy(line: Mapping[str, Any] | None) -> str:
    """With the deviation, and the number of seeds where it is not what was asked for."""
    if line is None:
        return ""
    spread, seeds = line["accuracy_deviation"], line["seeds"]
    told = f"{line['accuracy']:.1%}" + ("" if spread is None else f" ± {100 * spread:.1f}")
    return told + ("" if seeds == SEEDS else f" ({seeds})")


MEANS = ("accuracy", "macs", "macs_share", "parameters", "prune_seconds", "exited")
