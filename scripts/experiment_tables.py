"""The tables of single experiments."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from result_files import experiment, origin, runs_of, shuffled

from deepmoe.config_versions import REMOVED
from deepmoe.costs import format_macs
from deepmoe.results import markdown_table
from deepmoe.sweep import RunResult, summary
from deepmoe.sweep.grid import group_of


def sweep_table(name: str, shares: Mapping[str, str] | None = None) -> str:
    """Mean and deviation of each run of a sweep; further shares by the titles of their columns."""
    shares = shares or {}
    rows = [
        (
            row["run"],
            row["seeds"],
            percent(row, "accuracy"),
            f"{row['evaluation_loss']:.3f}",
            percent(row, "train_accuracy"),
            format_macs(row["macs"]),
            *(percent(row, share) for share in shares.values()),
        )
        for row in rows_of(name).values()
    ]
    results = runs_of(name).values()
    (images,) = evaluated_on(name)
    header = ["run", "seeds", f"accuracy ({images})", "loss", "training accuracy", "MACs", *shares]
    parts = [markdown_table(header, rows), origin(*(result.line for result in results))]
    gone = ", ".join(dict.fromkeys(text for result in results for text in _gone(result)))
    return "\n\n".join(
        [*parts, f"With settings that were removed since: {gone}."] if gone else parts
    )


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    """The figures of each run of a sweep, over its seeds."""
    results = runs_of(name)
    return {row["run"]: row for row in summary(results, results)}


def evaluated_on(name: str) -> set[str]:
    """Which images, and how many: so few that single points mean little, or not."""
    figures = [result.figures for result in runs_of(name).values()]
    kinds = {"holdout": "held-out"}
    named = ((f["images"], kinds.get(f["evaluated_on"], f["evaluated_on"])) for f in figures)
    return {f"{count:,} {kind} images" for count, kind in named}


def percent(row: dict[str, Any], key: str) -> str:
    """A share with its deviation over seeds, if there are several."""
    spread = f" ± {100 * row[f'{key}_deviation']:.2f}" if f"{key}_deviation" in row else ""
    return f"{100 * row[key]:.2f}%{spread}"


def wide_resnets_table() -> str:
    """What each network of the sweep is, and its figures."""
    results = runs_of("wide_resnets").values()
    settings = {group_of(result.name): result.settings for result in results}
    rows = []
    for run, row in rows_of("wide_resnets").items():
        model, train = settings[run]["model"], settings[run]["train"]
        rows.append(
            (
                f"`{run}`",
                model["name"],
                settings[run]["data"]["name"],
                f"{model['wide']:g}",
                "yes" if model["gates"] != "none" else "no",
                "yes" if train.get("teacher") else "no",
                percent(row, "accuracy"),
                format_macs(row["macs"]),
                row["seeds"],
            )
        )
    header = ["run", "network", "data", "width", "gates", "teachers", "accuracy", "MACs", "seeds"]
    return f"{markdown_table(header, rows)}\n\n{origin(*(result.line for result in results))}"


def quickstart_table() -> str:
    """What `make quickstart` measured."""
    result = experiment("quickstart/results")
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


def dense_table() -> str:
    """Dense VGG-16 on CIFAR-100."""
    results = [experiment(f"cifar100_dense/{name}") for name in ("plain", "smoothing")]
    rows = [
        (name, f"{run['accuracy']:.2%}", f"`{run['command']}`")
        for result in results
        for name, run in result["values"].items()
    ]
    table = markdown_table(["run", "test accuracy", "command"], rows)
    return "\n\n".join([table, *map(origin, results)])


def budget_table() -> str:
    """Targets of a compute budget, and what was reached."""
    result = experiment("macs_budget/results")
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
    result = experiment("camvid/results")
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


def epochs_table(name: str) -> str:
    """How a run of the literal recipe goes, by some of its epochs."""
    result = experiment(name)
    (images,) = {epoch.get("evaluated_on", "test") for epoch in result["values"]}
    embeds = any("embedding_accuracy" in epoch for epoch in result["values"])
    rows = [
        (
            epoch["epoch"],
            f"{epoch['train_accuracy']:.2%}",
            f"{epoch['gate_l1']:.0f}",
            f"{epoch['embedding_loss']:.2f}",
            *([_share(epoch, "embedding_accuracy")] * embeds),
            _share(epoch, "accuracy"),
            f"{epoch['macs_share']:.1%}" if "macs_share" in epoch else "",
        )
        for epoch in result["values"]
    ]
    header = ["epoch", "training accuracy", "sum of an image's gates", "embedding's own loss"]
    header += ["embedding's own accuracy"] * embeds + [f"accuracy ({images})", "of dense MACs"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def _share(epoch: dict[str, Any], key: str) -> str:
    return f"{epoch[key]:.2%}" if key in epoch else ""


def literal_table(name: str) -> str:
    """Readings of the literal recipe: a row for each norm, lambda and start of the heads."""
    runs = runs_of(name)
    found: dict[tuple[str, float, str], dict[str, dict[str, Any]]] = {}
    for run in runs.values():
        loss, heads = run.settings["loss"], run.settings["heads"]
        key = (loss["l1"], loss["sparsity"], heads["init"])
        found.setdefault(key, {})[run.settings["embedding"]["form"]] = run.figures
    rows = []
    for (norm, sparsity, start), by_form in sorted(found.items(), key=_sums_first):
        cells = [
            f"{by_form[form][key]:.1%}" if form in by_form else ""
            for form in ("classes", "latent")
            for key in ("accuracy", "embedding_accuracy", "macs_share")
        ]
        rows.append((norm, f"{sparsity:g}", f"`{start}`", *cells))
    header = ["norm", "lambda", "start of the heads"]
    for form in ("classes", "latent"):
        header += [f"{form}: accuracy", f"{form}: embedding", f"{form}: MACs"]
    return f"{markdown_table(header, rows)}\n\n{origin(*(run.line for run in runs.values()))}"


def _sums_first(reading: tuple[tuple[str, float, str], Any]) -> tuple[bool, float, str]:
    (norm, sparsity, start), _ = reading
    return norm != "sum", sparsity, start


def shuffle_small_table() -> str:
    """Accuracy under gates of other classes: a row for each network, all images and dolphins."""
    results = shuffled("shuffle_small")
    by_network: dict[str, list[dict[str, Any]]] = {}
    for (network, _), result in results.items():
        by_network.setdefault(network, []).append(result["values"])
    parts = []
    for images, title in (("all", "Images of all classes"), ("dolphin", "Dolphins")):
        rows = [
            (f"`{network}`", len(seeds), *_shuffled_cells(seeds, images))
            for network, seeds in by_network.items()
        ]
        header = ["run", "seeds", "embedding", "MACs, of dense", *GATES, "same above other"]
        parts += [f"{title}:", markdown_table(header, rows)]
    return "\n\n".join([*parts, origin(*results.values())])


def _shuffled_cells(seeds: list[dict[str, Any]], images: str) -> list[str]:
    """The mean over seeds; of the effect itself, the deviation, too."""
    shares = [[s["evaluation"][key] for s in seeds] for key in ("embedding_accuracy", "macs_share")]
    gates = [[s[images][key] for s in seeds] for key in GATES.values()]
    points = [100 * (s[images]["in_group"] - s[images]["out_of_group"]) for s in seeds]
    deviation = f" ± {statistics.stdev(points):.1f}" if len(seeds) > 1 else ""
    return [
        *(f"{statistics.fmean(share):.0%}" for share in shares),
        *(f"{100 * statistics.fmean(gate):.1f} %" for gate in gates),
        f"{statistics.fmean(points):.1f}{deviation}",
    ]


# Whose gates images get; how often the answer is their class.
GATES = {"own": "own", "same": "in_group", "other": "out_of_group", "follows": "followed"}


def curve_table(name: str, runs: Iterable[str], ending: str = "") -> str:
    """Accuracy and cost of an experiment's checkpoints, their small gates closed more and more."""
    found = [experiment(f"{name}/curve_{run}{ending}") for run in runs]
    rows = [
        (
            f"{points[0]['threshold']:g}",
            *(t for p in points for t in (f"{p['macs_share']:.1%}", f"{p['accuracy']:.2%}")),
        )
        for points in zip(*(result["values"] for result in found), strict=True)
    ]
    header = ["gates closed below"]
    header += [f"{run}: {what}" for run in runs for what in ("of dense MACs", "accuracy")]
    return f"{markdown_table(header, rows)}\n\n{origin(*found)}"


def cut_table() -> str:
    """One checkpoint, cut to several costs."""
    result = experiment("cifar100_gates/cut_four_many")
    rows = [
        (
            f"`--macs {cut['asked']}`",
            f"{format_macs(cut['macs'])} ({cut['macs_share']:.1%})",
            f"{cut['accuracy']:.2%}",
            f"{cut['sparse_accuracy']:.2%}",
        )
        for cut in result["values"]
    ]
    header = ["four_many, cut", "MACs", "accuracy", "in the sparse engine"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def _gone(result: RunResult) -> list[str]:
    """What a run was trained with that no run can have any more, in words."""
    found = []
    for key, removed in REMOVED.items():
        table, name = key.split(".")
        value = result.settings.get(table, {}).get(name)
        if value is not None and value not in removed.neutral:
            found.append(f"*{group_of(result.name)}* (`{key}`)")
    return found
