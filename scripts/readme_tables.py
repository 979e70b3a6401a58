"""The tables of README.md."""

import statistics
from collections.abc import Collection

from exit_tables import pruned, thin, voted
from recipe_tables import comparisons, row_of
from result_files import benchmark, origin

from deepmoe.costs import format_macs
from deepmoe.results import markdown_table

MOST_ROWS = 6
SHOWN_LATENCY = "torchvision resnet50"
SHOWN = {  # of each kind of network one, for the README
    *("deepmoe vgg16", "deepmoe resnet56", "deepmoe drn_a_50", "timm resnet50", "timm seresnet50"),
    *("hf RegNet", "timm mobilenetv3_large_100", "timm efficientnet_b0", "timm convnext_tiny"),
    "torchvision densenet121",
}
TRIED = ("counts", "gates", "removal", "sparse engine")
OBVIOUS = ("is the network's output", "is read by the classifier")  # the same in every network


def latency_sentence() -> str:
    """One figure of speed, of a network that everybody knows."""
    result = benchmark("other_networks")
    (found,) = (v for v in result["values"] if v["network"] == SHOWN_LATENCY)
    times = found["median_ms"]
    dense = min(times["dense"], times["dense_channels_last"])
    return (
        f"torchvision's ResNet-50, one image of 224 px on one CPU core: **PyTorch {dense:.0f} ms, "
        f"our engine {times['engine_dense']:.0f} ms, and {times['sparse']:.0f} ms** with half of "
        f"the channels inside its blocks skipped ({found['macs_share']:.0%} of the MACs left). "
        "[Other networks](docs/sparse-engine.md#networks-of-other-packages)."
    )


def headline_table() -> str:
    """The few rows that say what to expect."""
    entries = comparisons()["headline"]
    assert len(entries) <= MOST_ROWS
    timed = benchmark("headline_latency")
    header = ["network", "method", "teachers", "epochs", "accuracy", "MACs", "ms"]
    rows = []
    for entry in entries:
        accuracy, macs = _figures(entry["run"])
        ms = timed["values"][entry["timed"]]["ms"]
        cells = (f"{100 * accuracy:.1f}%", format_macs(macs), f"{ms:.1f}")
        rows.append((*(entry[key] for key in header[:4]), *cells))
    table = markdown_table(header, rows)
    about = (
        "*ms*: one image, one CPU core, networks of these shapes, random weights, by our engine; "
        "with exits, the mean where as many images stop early as in the trained model."
    )
    return f"{table}\n\n{about} {origin(timed)}"


def networks_table(shown: Collection[str] | None = SHOWN) -> str:
    """What was tried in each network, what passed, and what stays ungated."""
    rows, found = [], benchmark("supported_networks")
    for value in found["values"]:
        if shown is not None and value["network"] not in shown:
            continue
        package, name = value["network"].split(" ", 1)
        tried = ["yes" if value[column] else "**no**" for column in TRIED]
        pinned = [f"{why} ({n})" for why, n in value["ungated"].items() if why not in OBVIOUS]
        share = f"{value['gated_share']:.0%}"
        rows.append((package, name, *tried, share, "; ".join(pinned) or "nothing"))
    header = ["package", "network", "counts", "gates", "removal", "engine", "gated"]
    return markdown_table([*header, "pinned, and why"], rows)


def _figures(run: str) -> tuple[float, float]:
    """Accuracy and MACs, means over seeds."""
    folder, _, name = run.partition("/")
    if folder not in ("exits", "vote"):
        row = row_of(run)
        return row["accuracy"], row["macs"]
    trained = thin if "_thin_" in name else pruned
    found = voted(name) if folder == "vote" else trained(name)
    macs = found["macs"]
    mean = statistics.fmean(macs) if isinstance(macs, list) else macs
    return statistics.fmean(found["accuracy"]), mean
