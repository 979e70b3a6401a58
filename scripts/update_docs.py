"""Fills the generated parts of the documents: tables from the code and from results, and plots.

A generated part stands between `<!-- NAME -->` and `<!-- /NAME -->`; an experiment's name stands
for the table of its runs. Run by `make docs`; a test fails while a part is out of date. With names
of documents, only those are filled.
"""

import io
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from benchmark_tables import (
    cpu_kernels_table,
    export_latency_table,
    input_speed_table,
    one_call_exits_table,
    one_call_table,
    other_networks_table,
    resume_gpu_table,
    sparse_grid_table,
    sparse_profile_cpu_table,
    sparse_profile_gpu_table,
    sparse_table,
    train_speed_table,
)
from compare_tables import (
    RESNET56,
    VGG16,
    full_size_curves,
    full_size_rows,
    full_size_table,
    methods_table,
    published_table,
    small_table,
)
from config_reference import config_tables
from exit_tables import (
    criteria_table,
    embedding_table,
    field_table,
    front_curves,
    front_table,
    headline_curves,
    pairs_table,
    saved_table,
    speed_table,
    vote_table,
    whole_curves,
    whole_front_table,
)
from exit_tables import targets_table as exit_targets_table
from experiment_tables import (
    budget_table,
    camvid_table,
    curve_table,
    cut_table,
    dense_table,
    epochs_table,
    literal_table,
    quickstart_table,
    shuffle_small_table,
    sweep_table,
    wide_resnets_table,
)
from matplotlib.figure import Figure
from paper_tables import FIGURES as PAPER_FIGURES
from paper_tables import camvid_twice, more_results, names_table
from paper_tables import figure as paper_figure
from paper_tables import results as paper_results
from paper_tables import summary as paper_summary
from readme_tables import headline_table, latency_sentence, networks_table
from recipe_tables import (
    cost_curves,
    ingredients_table,
    parts_table,
    runs_table,
    targets_table,
)
from result_files import BENCHMARKS, EXPERIMENTS, ROOT
from scale_tables import measured_table, plan_table

from deepmoe.analysis.plots import cost_curve_plot
from deepmoe.costs import format_macs, zoo_costs
from deepmoe.results import markdown_table
from deepmoe.sweep import RESULTS_NAME


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


SWEEPS = sorted(path.parent.name for path in EXPERIMENTS.glob(f"*/{RESULTS_NAME}"))
FOUR = ("four", "four_many")
SMALL = ("split_three", "many_costs", "many_costs_whole")
PARTS: dict[str, Callable[[], str]] = {
    **{name: partial(sweep_table, name) for name in SWEEPS},
    "literal_small": partial(literal_table, "literal_small"),
    "literal_cifar100": partial(literal_table, "literal_cifar100"),
    "shuffle_small": shuffle_small_table,
    "shuffle_full": partial(
        sweep_table,
        "shuffle_full",
        {"of dense MACs": "macs_share", "embedding's accuracy": "embedding_accuracy"},
    ),
    "wide_resnets": wide_resnets_table,
    "models": models_table,
    "quickstart": quickstart_table,
    "headline": headline_table,
    "latency": latency_sentence,
    "all-networks": partial(networks_table, shown=None),
    "configuration": config_tables,
    "scale-measured": measured_table,
    "scale-plan": plan_table,
    "networks": networks_table,
    "recipe-runs": runs_table,
    "targets": targets_table,
    "parts": parts_table,
    "ingredients": ingredients_table,
    "cifar100_dense": dense_table,
    "macs_budget": budget_table,
    "camvid": camvid_table,
    "literal-strong": partial(epochs_table, "vgg16_literal/strong"),
    "literal-full": partial(epochs_table, "literal_full/epochs"),
    "curve-refitted": partial(curve_table, "cifar100_gates", FOUR, "_refitted"),
    "curve-plain": partial(curve_table, "cifar100_gates", FOUR),
    "curve-small": partial(curve_table, "small_by_heart", SMALL),
    "cut-four-many": cut_table,
    "compare-methods": methods_table,
    "compare-small": small_table,
    "compare-published": published_table,
    "compare-full-size": partial(full_size_table, VGG16),
    "compare-rows": partial(full_size_rows, VGG16),
    "compare-resnet56": partial(full_size_rows, RESNET56),
    "paper-names": names_table,
    "paper-results": paper_results,
    "paper-more": more_results,
    "paper-summary": paper_summary,
    "paper-twice": camvid_twice,
    "exit-front": front_table,
    "exit-whole": whole_front_table,
    "exit-pairs": pairs_table,
    "exit-saved": saved_table,
    "exit-embeddings": embedding_table,
    "exit-field": field_table,
    "exit-targets": exit_targets_table,
    "exit-speed": speed_table,
    "exit-vote": vote_table,
    "vote-criteria": criteria_table,
    "train-speed": train_speed_table,
    "input-speed": input_speed_table,
    "sparse-cpu": partial(sparse_table, "cpu"),
    "sparse-gpu": partial(sparse_table, "gpu"),
    "sparse-grid": partial(sparse_grid_table, "cpu"),
    "sparse-grid-gpu": partial(sparse_grid_table, "gpu"),
    "profile-cpu": sparse_profile_cpu_table,
    "profile-gpu": sparse_profile_gpu_table,
    "one-call": one_call_table,
    "one-call-exits": one_call_exits_table,
    "cpu-kernels": cpu_kernels_table,
    "other-networks": other_networks_table,
    "resume-gpu": resume_gpu_table,
    "export-latency": export_latency_table,
}
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    BENCHMARKS / "README.md",
    *sorted(EXPERIMENTS.glob("**/README.md")),
]
CURVES = {
    "compare-vgg16": full_size_curves,
    "costs": cost_curves,
    "exits": front_curves,
    "exits-cifar10": partial(whole_curves, "CIFAR-10", "vgg16"),
    "exits-cifar100": partial(whole_curves, "CIFAR-100", "vgg16"),
    "exits-resnet56": partial(whole_curves, "CIFAR-100", "resnet56"),
    "headline": headline_curves,
}
FEW_PERCENT = 0.07  # curves that begin below it are drawn on a logarithmic scale


def filled(text: str) -> str:
    """The text with every generated part brought up to date."""
    return re.sub(
        r"(<!-- ([\w-]+) -->\n).*?(<!-- /\2 -->)",
        lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[3]}",
        text,
        flags=re.DOTALL,
    )


def cost_figure(curves_of: Callable[[], dict[str, list[dict[str, Any]]]]) -> tuple[Figure, str]:
    """A plot of accuracy against cost, and its points in words."""
    curves = curves_of()
    points = {
        name: ", ".join(f"{p['accuracy']:.2%} at {p['macs_share']:.1%}" for p in curve)
        for name, curve in curves.items()
    }
    least = min(point["macs_share"] for curve in curves.values() for point in curve)
    words = "; ".join(f"{name}: {listed}" for name, listed in points.items())
    return cost_curve_plot(curves, log=least < FEW_PERCENT), words


PLOTS = {
    **{ROOT / "docs" / f"{name}.svg": partial(cost_figure, of) for name, of in CURVES.items()},
    **{ROOT / "docs" / f"paper-{name}.svg": partial(paper_figure, name) for name in PAPER_FIGURES},
}


def as_svg(make: Callable[[], tuple[Figure, str]]) -> str:
    """A plot, with its points written out in the description."""
    # The same file from the same points, and text that can be searched.
    with matplotlib.rc_context({"svg.hashsalt": "deepmoe", "svg.fonttype": "none"}):
        figure, words = make()
        buffer = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Description": words}
        figure.savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


if __name__ == "__main__":
    for document in [Path(name) for name in sys.argv[1:]] or DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
    for path, make in PLOTS.items():
        path.write_text(as_svg(make), encoding="utf-8")
