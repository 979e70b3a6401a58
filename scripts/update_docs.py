"""Fills the generated parts of the documents: tables from the code and from results/*.json, a plot.

A generated part stands between `<!-- NAME -->` and `<!-- /NAME -->`. Run by `make docs`; a test
fails while a part is out of date.
"""

import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib
from recipe_tables import (
    collapse_table,
    cost_curves,
    curve_table,
    cut_table,
    headline_table,
    ingredients_table,
    parts_table,
    sweep_table,
    targets_table,
)
from result_files import ROOT, origin, read_result

from deepmoe.analysis.plots import cost_curve_plot
from deepmoe.costs import format_macs, zoo_costs
from deepmoe.results import markdown_table


def models_table() -> str:
    """The zoo at its usual input, with its usual classes."""
    rows = [
        (
            f"`{m['model']}`",
            m["input"],
            m["classes"],
            m["gates"],
            f"{m['params'] / 1e6:.2f} M",
            format_macs(m["macs"]),
            f"{m['embedding_macs'] / m['macs']:.1%}",
            ", ".join(m["options"]),
        )
        for m in zoo_costs()
    ]
    header = ["model", "input", "classes", "gates", "parameters", "MACs", "embedding", "options"]
    return markdown_table(header, rows)


def quickstart_table() -> str:
    """What `make quickstart` measured."""
    result = read_result("quickstart")
    rows = [
        (
            name,
            f"{v['accuracy']:.2%}",
            format_macs(v["macs"]),
            f"{v['macs_share']:.1%}",
            f"{v['active']:.1%}",
        )
        for name, v in result["values"].items()
    ]
    header = ["network", "accuracy", "mean MACs", "of dense MACs", "active channels"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def train_speed_table() -> str:
    """Seconds a training epoch, and where the time of a batch goes."""
    rows = []
    names = {"vgg16": "yes", "resnet56": "yes", "vgg16_without_graphs": "no"}
    results = [read_result(f"train_speed_{name}") for name in names]
    for graphs, values in zip(names.values(), (r["values"] for r in results), strict=True):
        for kind, seconds in values["seconds_per_epoch"].items():
            ratio = values["ratio_to_dense"].get(kind, 1.0)
            low, high = values["spread"][kind]
            spent = values.get("gpu_milliseconds_per_batch", values["milliseconds_per_batch"])[kind]
            rows.append(
                (
                    values["model"],
                    graphs,
                    kind,
                    f"{seconds:.2f} ({low:.2f} to {high:.2f})",
                    f"{ratio:.2f}",
                    ", ".join(f"{what} {time:.2f}" for what, time in spent.items()),
                )
            )
    header = [
        "network",
        "CUDA graphs",
        "kind",
        "seconds an epoch",
        "of dense",
        "ms a batch: by kind of kernel, or by phase without graphs",
    ]
    return "\n\n".join([markdown_table(header, rows), *map(origin, results)])


def input_speed_table() -> str:
    """Decoded training images a second on one core."""
    result = read_result("input_speed")
    values = result["values"]
    rows = [
        ("decode and crop, as in our workers", values["ours_decode_per_s"], values["ratio_decode"]),
        ("the same, mirror, jitter, normalise", values["ours_total_per_s"], values["ratio_total"]),
        (f"torchvision {values['torchvision']}", values["torchvision_per_s"], 1.0),
    ]
    lines = [(name, f"{rate:.0f}", f"{ratio:.2f}") for name, rate, ratio in rows]
    header = ["pipeline", "images a second", "of torchvision's"]
    return f"{markdown_table(header, lines)}\n\n{origin(result)}"


def cifar100_table() -> str:
    """Dense VGG-16 on CIFAR-100."""
    results = [read_result(name) for name in ("cifar100_dense", "cifar100_dense_smoothing")]
    rows = [
        (name, f"{run['accuracy']:.2%}", f"`{run['command']}`")
        for result in results
        for name, run in result["values"].items()
    ]
    table = markdown_table(["run", "test accuracy", "command"], rows)
    return "\n\n".join([table, *map(origin, results)])


def budget_table() -> str:
    """Targets of a compute budget, and what was reached."""
    result = read_result("macs_budget")
    rows = [
        (
            name,
            run["init"],
            f"{run['macs_share']:.4f}",
            f"{run['macs_share'] / run['target'] - 1:+.1%}",
            f"{run['accuracy']:.2%}",
            run["epochs"],
        )
        for name, run in result["values"].items()
    ]
    header = ["run", "gates start from", "share of dense MACs", "off by", "test accuracy", "epochs"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def camvid_table() -> str:
    """Segmentation on CamVid."""
    result = read_result("camvid")
    rows = [
        (
            name,
            f"{run['mean_iou']:.4f}",
            f"{run['pixel_accuracy']:.2%}",
            f"{run['macs_share']:.1%}",
            f"`{run['command']}`",
        )
        for name, run in result["values"].items()
    ]
    header = ["network", "mean IoU", "pixel accuracy", "of dense MACs", "command"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


SPARSE_COLUMNS = {
    "dense_wide": "dense wide",
    "dense_base": "dense base",
    "presliced": "sliced before",
    "dynamic": "dynamic",
    "codebook": "codebook",
    "dense_wide_packed": "dense wide, packed",
    "presliced_packed": "sliced, packed",
}


def sparse_table(device: str) -> str:
    """What skipped channels save in inference, on one kind of device."""
    paths = sorted((ROOT / "results").glob(f"sparse_{device}_*.json"))
    results = [read_result(path.stem) for path in paths]
    rows = []
    for result in results:
        v = result["values"]
        times = [_milliseconds(v, key) for key in SPARSE_COLUMNS]
        gains = [f"{v['dense_wide_ms'] / v[f'{m}_ms']:.2f}" for m in ("dynamic", "codebook")]
        model = result["command"].split()[3]
        rows.append((model, v["batch"], f"{v['density']:.2f}", v["codes"], *times, *gains))
    header = ["network, wide 2", "batch", "density", "codes", *SPARSE_COLUMNS.values()]
    header += ["gain of dynamic", "gain of codebook"]
    return "\n\n".join([markdown_table(header, rows), *map(origin, results)])


def sparse_grid_table(device: str) -> str:
    """Time against density and batch size."""
    result = read_result(f"sparse_grid_{device}")
    keys = ("dense_wide", "presliced", "masked", "dynamic", "codebook")
    rows = [
        (v["batch"], f"{v['density']:.2f}", *(f"{v[f'{key}_ms']:.2f}" for key in keys))
        for v in result["values"]
    ]
    header = ["batch", "density", "dense", "sliced before", "masked", "dynamic", "codebook"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def sparse_profile_cpu_table() -> str:
    """Where the dynamic mode's time goes on a CPU, layer by layer."""
    result = read_result("profile_sparse_cpu")
    keys = ("total_ms", "kernels_ms", "packed_ms")
    rows = [
        (path, v["way"], *(f"{v[key]:.2f}" for key in keys))
        for path, v in result["values"]["layers"].items()
    ]
    rows.append(("all", "", f"{result['values']['total_ms']:.2f}", "", ""))
    header = ["layer", "way", "dynamic, ms", "of that in kernels", "packed"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)} ({result['command']})"


def sparse_profile_gpu_table() -> str:
    """Where the codebook mode's time goes on a GPU."""
    result = read_result("profile_sparse_gpu")
    rows = [(part, f"{ms:.2f}") for part, ms in result["values"].items()]
    return f"{markdown_table(['part', 'ms'], rows)}\n\n{origin(result)} ({result['command']})"


def _milliseconds(values: dict[str, Any], key: str) -> str:
    low, high = values["spread_ms"][key]
    return f"{values[f'{key}_ms']:.2f} ({low:.2f} to {high:.2f})"


SWEEPS = sorted(path.stem for path in (ROOT / "sweeps").glob("*.toml"))
PARTS: dict[str, Callable[[], str]] = {
    **{name.replace("_", "-"): partial(sweep_table, name) for name in SWEEPS},
    "models": models_table,
    "quickstart": quickstart_table,
    "train-speed": train_speed_table,
    "input-speed": input_speed_table,
    "cifar100": cifar100_table,
    "budget": budget_table,
    "camvid": camvid_table,
    "sparse-cpu": partial(sparse_table, "cpu"),
    "sparse-gpu": partial(sparse_table, "gpu"),
    "sparse-grid": partial(sparse_grid_table, "cpu"),
    "sparse-grid-gpu": partial(sparse_grid_table, "gpu"),
    "headline": headline_table,
    "targets": targets_table,
    "parts": parts_table,
    "ingredients": ingredients_table,
    "vgg16-literal-strong": collapse_table,
    "curve-refitted": partial(
        curve_table, {run: f"vgg16_curve_{run}_refitted" for run in ("four", "four_many")}
    ),
    "curve-plain": partial(
        curve_table, {run: f"vgg16_curve_{run}" for run in ("four", "four_many")}
    ),
    "cut-four-many": cut_table,
    "curve-small": partial(
        curve_table,
        {run: f"small_curve_{run}" for run in ("split_three", "many_costs", "many_costs_whole")},
    ),
    "profile-cpu": sparse_profile_cpu_table,
    "profile-gpu": sparse_profile_gpu_table,
}
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{n}.md" for n in ("results", "sparse-engine", "recipe", "experiments")),
]

COSTS = ROOT / "docs" / "costs.svg"


def filled(text: str) -> str:
    """The text with every generated part brought up to date."""
    return re.sub(
        r"(<!-- ([\w-]+) -->\n).*?(<!-- /\2 -->)",
        lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[3]}",
        text,
        flags=re.DOTALL,
    )


def costs_as_svg() -> str:
    """The plot of docs/recipe.md, its points written out in the description."""
    curves = cost_curves()
    points = {
        name: ", ".join(f"{p['accuracy']:.2%} at {p['macs_share']:.1%}" for p in curve)
        for name, curve in curves.items()
    }
    description = "; ".join(f"{name}: {listed}" for name, listed in points.items())
    # The same file from the same points, and text that can be searched.
    with matplotlib.rc_context({"svg.hashsalt": "deepmoe", "svg.fonttype": "none"}):
        buffer = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Description": description}
        cost_curve_plot(curves).savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
    COSTS.write_text(costs_as_svg(), encoding="utf-8")
