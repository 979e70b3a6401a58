"""The tables of docs/compare.md."""

from result_files import experiment, origin

from deepmoe.compare import METHODS
from deepmoe.comparison.table import HEADER, table_cells
from deepmoe.costs import format_macs
from deepmoe.results import markdown_table

SMALL = "compare_small/table"
HELD_OUT = "compare_cifar100/vgg16_heldout"
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


def held_out_table() -> str:
    """CIFAR-100, vgg16: accuracy on held-out images of all methods that came to their end."""
    found = experiment(HELD_OUT)
    lines = {(v["method"], v["share"]): v for v in found["values"] if v["seed"] == 0}
    shares = sorted({share for _, share in lines if share < 1}, reverse=True)
    rows = []
    for method in METHODS:
        if method.fits_exits:
            continue  # their cost is known once exits are fitted, which they were not
        own = [lines.get((method.name, 1.0 if method.one_cost else share)) for share in shares]
        told = ["" if line is None else f"{line['accuracy']:.1%}" for line in own]
        epochs = sorted({str(line["epochs"]) for line in own if line is not None}, key=int)
        if any(told):
            if method.one_cost:
                told = [told[0]] + [""] * (len(shares) - 1)
            rows.append((method.title, ", ".join(epochs), *told))
    header = ["method", "epochs", *(f"{share:.0%} of the MACs" for share in shares)]
    return f"{markdown_table(header, rows)}\n\n{origin(found)}"
