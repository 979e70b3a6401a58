"""Fills the generated parts of the documents: tables from the code and from results/*.json.

A generated part stands between `<!-- NAME -->` and `<!-- /NAME -->`. Run by `make docs`; a test
fails while a part is out of date.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from deepmoe.costs import format_macs, zoo_costs
from deepmoe.results import markdown_table
from deepmoe.sweep import read_grid, summary

ROOT = Path(__file__).parents[1]


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
    result = _read_result("quickstart")
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
    return f"{markdown_table(header, rows)}\n\n{_origin(result)}"


def train_speed_table() -> str:
    """Seconds a training epoch, and where the time of a batch goes."""
    rows = []
    names = {"vgg16": "yes", "resnet56": "yes", "vgg16_without_graphs": "no"}
    results = [_read_result(f"train_speed_{name}") for name in names]
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
    return "\n\n".join([markdown_table(header, rows), *map(_origin, results)])


def input_speed_table() -> str:
    """Decoded training images a second on one core."""
    result = _read_result("input_speed")
    values = result["values"]
    rows = [
        ("decode and crop, as in our workers", values["ours_decode_per_s"], values["ratio_decode"]),
        ("the same, mirror, jitter, normalise", values["ours_total_per_s"], values["ratio_total"]),
        (f"torchvision {values['torchvision']}", values["torchvision_per_s"], 1.0),
    ]
    lines = [(name, f"{rate:.0f}", f"{ratio:.2f}") for name, rate, ratio in rows]
    header = ["pipeline", "images a second", "of torchvision's"]
    return f"{markdown_table(header, lines)}\n\n{_origin(result)}"


def cifar100_table() -> str:
    """Dense VGG-16 on CIFAR-100."""
    results = [_read_result(name) for name in ("cifar100_dense", "cifar100_dense_smoothing")]
    rows = [
        (name, f"{run['accuracy']:.2%}", f"`{run['command']}`")
        for result in results
        for name, run in result["values"].items()
    ]
    table = markdown_table(["run", "test accuracy", "command"], rows)
    return "\n\n".join([table, *map(_origin, results)])


def budget_table() -> str:
    """Targets of a compute budget, and what was reached."""
    result = _read_result("macs_budget")
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
    return f"{markdown_table(header, rows)}\n\n{_origin(result)}"


def camvid_table() -> str:
    """Segmentation on CamVid."""
    result = _read_result("camvid")
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
    return f"{markdown_table(header, rows)}\n\n{_origin(result)}"


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
    results = [_read_result(path.stem) for path in paths]
    rows = []
    for result in results:
        v = result["values"]
        times = [_milliseconds(v, key) for key in SPARSE_COLUMNS]
        gains = [f"{v['dense_wide_ms'] / v[f'{m}_ms']:.2f}" for m in ("dynamic", "codebook")]
        model = result["command"].split()[3]
        rows.append((model, v["batch"], f"{v['density']:.2f}", v["codes"], *times, *gains))
    header = ["network, wide 2", "batch", "density", "codes", *SPARSE_COLUMNS.values()]
    header += ["gain of dynamic", "gain of codebook"]
    return "\n\n".join([markdown_table(header, rows), *map(_origin, results)])


def sparse_grid_table(device: str) -> str:
    """Time against density and batch size."""
    result = _read_result(f"sparse_grid_{device}")
    keys = ("dense_wide", "presliced", "masked", "dynamic", "codebook")
    rows = [
        (v["batch"], f"{v['density']:.2f}", *(f"{v[f'{key}_ms']:.2f}" for key in keys))
        for v in result["values"]
    ]
    header = ["batch", "density", "dense", "sliced before", "masked", "dynamic", "codebook"]
    return f"{markdown_table(header, rows)}\n\n{_origin(result)}"


def sparse_profile_cpu_table() -> str:
    """Where the dynamic mode's time goes on a CPU, layer by layer."""
    result = _read_result("profile_sparse_cpu")
    keys = ("total_ms", "kernels_ms", "packed_ms")
    rows = [
        (path, v["way"], *(f"{v[key]:.2f}" for key in keys))
        for path, v in result["values"]["layers"].items()
    ]
    rows.append(("all", "", f"{result['values']['total_ms']:.2f}", "", ""))
    header = ["layer", "way", "dynamic, ms", "of that in kernels", "packed"]
    return f"{markdown_table(header, rows)}\n\n{_origin(result)} ({result['command']})"


def sparse_profile_gpu_table() -> str:
    """Where the codebook mode's time goes on a GPU."""
    result = _read_result("profile_sparse_gpu")
    rows = [(part, f"{ms:.2f}") for part, ms in result["values"].items()]
    return f"{markdown_table(['part', 'ms'], rows)}\n\n{_origin(result)} ({result['command']})"


def sweep_table(name: str) -> str:
    """Mean and deviation of each run of a sweep, as far as it is done."""
    rows = [
        (
            row["run"],
            row["seeds"],
            _percent(row, "accuracy"),
            f"{row['evaluation_loss']:.3f}" if "evaluation_loss" in row else "",
            _percent(row, "train_accuracy"),
            format_macs(row["macs"]) if "macs" in row else "",
        )
        for row in _sweep_rows(name).values()
    ]
    paths = sorted((ROOT / "results" / name).glob("*.json"))
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    evaluated_on = results[0]["values"]["last"]["evaluated_on"]
    header = ["run", "seeds", f"accuracy ({evaluated_on})", "loss", "training accuracy", "MACs"]
    return f"{markdown_table(header, rows)}\n\n{_origin(*results)}"


HEADLINE = {
    "vgg16, dense": "dense",
    "vgg16, thin: dense with the MACs of the next": "thin",
    "vgg16, gated": "best",
    "vgg16, gated, 16 routes": "best_codes",
    "vgg16 W13-All, dense": "w13_dense",
    "vgg16 W13-All, gated": "w13_best",
    "resnet56, dense": "resnet56_dense",
    "resnet56 wide 2, gated": "resnet56_best",
}


def headline_table() -> str:
    """The best recipes next to networks without gates."""
    rows = _sweep_rows("cifar100_best")
    return markdown_table(
        ["network", "accuracy", "MACs", "seeds"],
        [
            (
                name,
                _percent(rows[run], "accuracy"),
                format_macs(rows[run]["macs"]),
                rows[run]["seeds"],
            )
            for name, run in HEADLINE.items()
        ],
    )


class Effect(NamedTuple):
    """What a part of a recipe is worth: two runs, as SWEEP/RUN, that differ in it."""

    part: str
    with_it: str
    without: str

    def row(self) -> tuple[str, ...]:
        """Of the table."""
        return self.part, *_difference(self.with_it, self.without)


class Ingredient(NamedTuple):
    """A setting that may make a recipe better, and what it was worth where that was measured."""

    what: str
    setting: str
    with_it: str = ""
    without: str = ""

    def row(self) -> tuple[str, ...]:
        """Of the table."""
        measured = _difference(self.with_it, self.without) if self.with_it else ("", "")
        return self.what, self.setting, *measured


def _difference(with_it: str, without: str) -> tuple[str, str]:
    """Points of accuracy between two runs, and their names."""
    accuracies, names = [], []
    for name in (with_it, without):
        sweep, _, run = name.partition("/")
        row = _sweep_rows(sweep)[run]
        accuracies.append(100 * row["accuracy"])
        names.append(f"{run} ({row['seeds']})")
    return f"{accuracies[0] - accuracies[1]:+.2f}", " against ".join(names)


INGREDIENTS = (
    Ingredient(
        "no gate that reaches the classifier directly",
        "`model.gate_last = false`",
        "vgg16_taught/split",
        "vgg16_taught/split_last",
    ),
    Ingredient(
        "free mixture weights instead of class probabilities",
        '`embedding.form = "latent"`, `embedding.dim`',
    ),
    Ingredient(
        "small or falling weight of the embedding's own loss",
        "`loss.embedding`, a number or points over epochs",
        "vgg16_gates/mu01",
        "vgg16_gates/rate10",
    ),
    Ingredient(
        "random softmax temperature",
        "`embedding.temperature`",
        "vgg16_gates/temperature",
        "vgg16_gates/rate10",
    ),
    Ingredient(
        "an embedding that learns from its own loss alone",
        "`embedding.task_gradient = false`",
        "vgg16_select/split_apart",
        "vgg16_select/split",
    ),
    Ingredient(
        "gates that start apart, for each class",
        '`heads.init = "normal(1, 0.3)"`',
        "vgg16_gates/normal",
        "vgg16_gates/rate10",
    ),
    Ingredient(
        "gates that start alike for all images, some of them closed for good",
        '`heads.init = "split(0.7)"` instead of `"channels(1, 0.3)"` and a budget',
        "vgg16_select/split",
        "vgg16_select/channels",
    ),
    Ingredient(
        "gates that learn faster than the rest, all open",
        "`heads.lr_scale = 30`",
        "vgg16_gates/open_rate30",
        "vgg16_gates/open",
    ),
    Ingredient(
        "the same, much faster, under a budget",
        "`heads.lr_scale = 100`",
        "vgg16_gates/rate100",
        "vgg16_gates/rate10",
    ),
    Ingredient("sparse pressure by hand, after a warm-up", "`loss.sparsity`, points over epochs"),
    Ingredient("a budget of MACs instead", "`train.target_macs`"),
    Ingredient(
        "a budget that is met early",
        "`train.budget_ramp = [0, 0.25]`",
        "vgg16_gates/early",
        "vgg16_gates/rate10",
    ),
    Ingredient(
        "more pressure where a channel costs more",
        "`train.budget_by_cost`",
        "vgg16_gates/by_cost",
        "vgg16_gates/rate10",
    ),
    Ingredient(
        "channels that a budget leaves to each layer",
        "`train.channel_floor = 0.6`",
        "vgg16_gates/floor",
        "vgg16_gates/rate10",
    ),
    Ingredient("a gradient for closed gates", "`heads.revive`"),
    Ingredient("grouped experts: several channels a gate", "`heads.group`"),
    Ingredient(
        "one cycle of the learning rate over both stages",
        '`train.schedule = "long-cycle"`',
        "cifar100_best/dense",
        "vgg16_first_recipe/dense",
    ),
    Ingredient(
        "longer and warmer second stage",
        "`train.finetune_epochs = 10`, `train.finetune_lr = 0.03`",
        "vgg16_gates/second_stage_warm",
        "vgg16_gates/rate10",
    ),
    Ingredient(
        "start from a trained network and its gates; "
        "if it has none, with the largest gates at its strongest channels",
        '`train.start = "runs/dense/last.safetensors"`',
        "vgg16_started_select/started",
        "vgg16_started_select/from_scratch",
    ),
    Ingredient(
        "learn from the outputs of trained networks, one or several",
        "`train.teacher`, `loss.distillation`, `loss.distillation_temperature`",
        "cifar100_best/smoothed_thin",
        "cifar100_best/thin",
    ),
    Ingredient(
        "images mixed in pairs",
        "`data.mixup`",
        "vgg16_started_select/started_mixup",
        "vgg16_started_select/started",
    ),
    Ingredient(
        "small gates closed at random, so that one checkpoint serves many costs",
        '`train.random_threshold`, with gates that start apart: `heads.init = "split(1, 0.5)"`',
        "small_by_heart/many_costs",
        "small_by_heart/split_three",
    ),
    Ingredient(
        "a codebook of routes, with eight more epochs",
        "`train.codes`",
        "cifar100_best/best_codes",
        "cifar100_best/best",
    ),
)


def ingredients_table() -> str:
    """What a recipe can be made of."""
    header = ["ingredient", "setting", "points", "runs (and seeds)"]
    return markdown_table(header, [ingredient.row() for ingredient in INGREDIENTS])


EFFECTS = {
    "the test set": (
        Effect(
            "one long cycle instead of two, 38 epochs either way",
            "cifar100_best/dense",
            "vgg16_first_recipe/dense",
        ),
        Effect(
            "a teacher trained with label smoothing, for a thin network",
            "cifar100_best/smoothed_thin",
            "cifar100_best/thin",
        ),
        Effect(
            "gates, next to a thin network with that teacher",
            "cifar100_best/smoothed",
            "cifar100_best/smoothed_thin",
        ),
        Effect(
            "instead: four teachers without smoothing, and a trained start",
            "cifar100_best/best",
            "cifar100_best/smoothed",
        ),
        Effect(
            "a codebook of 16 routes, with eight more epochs",
            "cifar100_best/best_codes",
            "cifar100_best/best",
        ),
        Effect(
            "to compare: twice the epochs, for the dense twin",
            "cifar100_best/dense_long",
            "cifar100_best/dense",
        ),
    ),
    "held-out images": (
        Effect(
            "three teachers without smoothing instead of one with it, none for the student, "
            "and a share of 0.9 instead of 0.7",
            "vgg16_started_select/from_scratch",
            "vgg16_select/split",
        ),
        Effect(
            "and to start from the trained twin",
            "vgg16_started_select/started",
            "vgg16_started_select/from_scratch",
        ),
        Effect(
            "and W13-All among the teachers",
            "vgg16_started_select/started_and_w13_teacher",
            "vgg16_started_select/started",
        ),
        Effect(
            "not taken: images mixed in pairs",
            "vgg16_started_select/started_mixup",
            "vgg16_started_select/started",
        ),
        Effect(
            "not taken: images that choose channels, under a budget",
            "vgg16_started_select/started_channels",
            "vgg16_started_select/started",
        ),
    ),
}


def effects_table() -> str:
    """What each part of the best recipe is worth."""
    rows = [(on, *effect.row()) for on, effects in EFFECTS.items() for effect in effects]
    return markdown_table(["on", "part", "points", "runs (and seeds)"], rows)


class Target(NamedTuple):
    """What is asked for, and what is reached."""

    what: str
    runs: tuple[str, ...]  # that the figure is made of
    reached: float
    bound: float
    at_most: bool = False
    written: Callable[[float], str] = "{:+.2f} points".format

    def row(self, seeds: dict[str, int]) -> tuple[str, ...]:
        """Of the table, given how many seeds each run has."""
        met = self.reached <= self.bound if self.at_most else self.reached >= self.bound
        bound = f"at {'most' if self.at_most else 'least'} {self.written(self.bound)}"
        of = ", ".join(f"{run} ({seeds[run]})" for run in self.runs)
        return self.what, bound, self.written(self.reached), "yes" if met else "**no**", of


def targets_table() -> str:
    """What the recipes are to reach, and what they reach."""
    rows = _sweep_rows("cifar100_best")
    accuracy = {run: 100 * row["accuracy"] for run, row in rows.items()}
    macs = {run: row["macs"] for run, row in rows.items()}

    def gain(run: str, over: str) -> tuple[tuple[str, ...], float]:
        return (run, over), accuracy[run] - accuracy[over]

    best, w13, resnet, resnet_dense = "best", "w13_best", "resnet56_best", "resnet56_dense"
    percent, share = "{:.2f} %".format, 100 * macs[best] / macs["dense"]
    targets = [
        Target("vgg16: of the dense MACs", (best, "dense"), share, 55, True, percent),
        Target("vgg16: above the dense twin", *gain(best, "dense"), 0),
        Target("vgg16: above the thin network", *gain(best, "thin"), 1),
        Target("W13-All: MACs", (w13,), macs[w13], 2.29e8, True, format_macs),
        Target("W13-All: accuracy", (w13,), accuracy[w13], 73.4, written=percent),
        Target("W13-All: above dense vgg16", *gain(w13, "dense"), 1.5),
        Target(
            "resnet56: MACs",
            (resnet, resnet_dense),
            macs[resnet],
            macs[resnet_dense],
            True,
            format_macs,
        ),
        Target("resnet56: error", (resnet,), 100 - accuracy[resnet], 29.77, True, percent),
        Target("resnet56: above the dense one", *gain(resnet, resnet_dense), 1.5),
        Target("vgg16, 16 codes: lost by them", *gain(best, "best_codes"), 0.5, True),
    ]
    seeds = {run: row["seeds"] for run, row in rows.items()}
    header = ["figure", "target", "reached", "met", "runs (and seeds)"]
    return markdown_table(header, [target.row(seeds) for target in targets])


def curve_table(results: dict[str, str]) -> str:
    """Accuracy and cost of checkpoints, their small gates closed more and more."""
    found = [_read_result(name) for name in results.values()]
    rows = [
        (
            f"{points[0]['threshold']:g}",
            *(t for p in points for t in (f"{p['macs_share']:.1%}", f"{p['accuracy']:.2%}")),
        )
        for points in zip(*(result["values"] for result in found), strict=True)
    ]
    header = ["gates closed below"]
    header += [f"{run}: {what}" for run in results for what in ("of dense MACs", "accuracy")]
    return f"{markdown_table(header, rows)}\n\n{_origin(*found)}"


def _sweep_rows(name: str) -> dict[str, dict[str, Any]]:
    """The figures of each run of a sweep, over its seeds."""
    grid = read_grid(ROOT / "sweeps" / f"{name}.toml")
    return {row["run"]: row for row in summary(grid, ROOT / "results" / name)}


def _percent(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    spread = f" ± {100 * row[f'{key}_deviation']:.2f}" if f"{key}_deviation" in row else ""
    return f"{100 * row[key]:.2f}%{spread}"


def _milliseconds(values: dict[str, Any], key: str) -> str:
    low, high = values["spread_ms"][key]
    return f"{values[f'{key}_ms']:.2f} ({low:.2f} to {high:.2f})"


PARTS: dict[str, Callable[[], str]] = {
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
    "vgg16-narrow-first": partial(sweep_table, "vgg16_narrow_first"),
    "vgg16-gates": partial(sweep_table, "vgg16_gates"),
    "vgg16-taught": partial(sweep_table, "vgg16_taught"),
    "vgg16-teachers": partial(sweep_table, "vgg16_teachers"),
    "vgg16-small": partial(sweep_table, "vgg16_small"),
    "small-by-heart": partial(sweep_table, "small_by_heart"),
    "resnet56-first": partial(sweep_table, "resnet56_first"),
    "vgg16-first-recipe": partial(sweep_table, "vgg16_first_recipe"),
    "headline": headline_table,
    "cifar100-best": partial(sweep_table, "cifar100_best"),
    "targets": targets_table,
    "effects": effects_table,
    "ingredients": ingredients_table,
    "vgg16-select": partial(sweep_table, "vgg16_select"),
    "vgg16-started-select": partial(sweep_table, "vgg16_started_select"),
    "vgg16-literal": partial(sweep_table, "vgg16_literal"),
    "curve-best": partial(curve_table, {"best": "vgg16_curve_best"}),
    "curve-small": partial(
        curve_table,
        {run: f"small_curve_{run}" for run in ("split_three", "many_costs", "many_costs_whole")},
    ),
    "profile-cpu": sparse_profile_cpu_table,
    "profile-gpu": sparse_profile_gpu_table,
}
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{n}.md" for n in ("results", "sparse-engine", "recipe")),
]


def filled(text: str) -> str:
    """The text with every generated part brought up to date."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", flags=re.DOTALL)
        if pattern.search(text):
            content = make()
            text = pattern.sub(lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text)
    return text


def _read_result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _origin(*results: dict[str, Any]) -> str:
    """Where results of one command are from."""
    one = results[0]
    seeds, commits = (
        ", ".join(sorted({str(result[key])[:7] for result in results}))
        for key in ("seed", "commit")
    )
    parts = [
        one["hardware"],
        f"torch {one['versions']['torch']}",
        f"seed {seeds}",
        f"commit {commits}",
        *([f"`{one['command']}`"] if one["command"].startswith("deepmoe") else []),
        *([one["note"]] if "note" in one else []),
    ]
    return f"({'; '.join(parts)})"


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
