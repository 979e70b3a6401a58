"""The tables of recipe.md and experiments.md: what sweeps measured, and what follows from that."""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from result_files import ROOT, origin, read_result

from deepmoe.costs import format_macs
from deepmoe.results import markdown_table
from deepmoe.sweep import read_grid, summary

LEAST_ACCURACY = 0.6  # in the plot of costs: nobody would take what lies below


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
    return f"{markdown_table(header, rows)}\n\n{origin(*results)}"


HEADLINE = {
    "vgg16, dense": "dense",
    "vgg16, dense, with the start and the teachers of the gated": "dense_started",
    "vgg16, thin: dense with the MACs of the gated": "thin",
    "vgg16, thin, with the teachers of the gated": "thin_taught",
    "vgg16, gated, but gates left as they start: a fixed choice of channels": "best_still",
    "vgg16, gated": "best",
    "vgg16, gated, 16 routes": "best_codes",
    "vgg16 W13-All, dense": "w13_dense",
    "vgg16 W13-All, gated": "w13_best",
    "resnet56, dense": "resnet56_dense",
    "resnet56 wide 2, gated, but gates left as they start": "resnet56_still",
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
        "vgg16_started_select/started_latent",
        "vgg16_started_select/started",
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
        "the same from a trained start, next to gates that stay as they start",
        "`heads.lr_scale = 30` instead of 0",
        "cifar100_best/best",
        "cifar100_best/best_still",
    ),
    Ingredient(
        "the same for resnet56",
        "`heads.lr_scale = 30` instead of 0",
        "cifar100_best/resnet56_best",
        "cifar100_best/resnet56_still",
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
        "cifar100_best/thin_taught",
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
        '`train.random_threshold`, with gates that start apart: `heads.init = "split(0.72, 0.3)"`',
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
            "four teachers without label smoothing, for a thin network",
            "cifar100_best/thin_taught",
            "cifar100_best/thin",
        ),
        Effect(
            "and a trained start, its strongest channels kept for good",
            "cifar100_best/best_still",
            "cifar100_best/thin_taught",
        ),
        Effect(
            "and gates that learn: vgg16",
            "cifar100_best/best",
            "cifar100_best/best_still",
        ),
        Effect(
            "and gates that learn: resnet56",
            "cifar100_best/resnet56_best",
            "cifar100_best/resnet56_still",
        ),
        Effect(
            "a codebook of 16 routes, with eight more epochs",
            "cifar100_best/best_codes",
            "cifar100_best/best",
        ),
        Effect(
            "to compare: teachers and start, for the dense twin",
            "cifar100_best/dense_started",
            "cifar100_best/dense",
        ),
        Effect(
            "to compare: twice the epochs, for the dense twin",
            "cifar100_best/dense_long",
            "cifar100_best/dense",
        ),
        Effect(
            "the recipe before: a teacher trained with label smoothing, for a thin network",
            "cifar100_best/smoothed_thin",
            "cifar100_best/thin",
        ),
        Effect(
            "the recipe before: gates, next to a thin network with that teacher",
            "cifar100_best/smoothed",
            "cifar100_best/smoothed_thin",
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
            "not taken: free mixture weights instead of class probabilities",
            "vgg16_started_select/started_latent",
            "vgg16_started_select/started",
        ),
        Effect(
            "not taken: gates at the base network's learning rate",
            "vgg16_started_select/started_rate1",
            "vgg16_started_select/started",
        ),
        Effect(
            "to compare: gates that stay as they start",
            "vgg16_started_select/started_still",
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


def collapse_table() -> str:
    """How the literal recipe goes with a lambda that is too large."""
    result = read_result("vgg16_literal_strong")
    rows = [
        (
            epoch["epoch"],
            f"{epoch['train_accuracy']:.2%}",
            f"{epoch['gate_l1']:.0f}",
            f"{epoch['embedding_loss']:.2f}",
            f"{epoch['accuracy']:.2%}" if "accuracy" in epoch else "",
            f"{epoch['macs_share']:.1%}" if "macs_share" in epoch else "",
        )
        for epoch in result["values"]
    ]
    header = ["epoch", "training accuracy", "sum of an image's gates", "embedding's own loss"]
    header += ["accuracy (test)", "of dense MACs"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def curve_table(results: dict[str, str]) -> str:
    """Accuracy and cost of checkpoints, their small gates closed more and more."""
    found = [read_result(name) for name in results.values()]
    rows = [
        (
            f"{points[0]['threshold']:g}",
            *(t for p in points for t in (f"{p['macs_share']:.1%}", f"{p['accuracy']:.2%}")),
        )
        for points in zip(*(result["values"] for result in found), strict=True)
    ]
    header = ["gates closed below"]
    header += [f"{run}: {what}" for run in results for what in ("of dense MACs", "accuracy")]
    return f"{markdown_table(header, rows)}\n\n{origin(*found)}"


def cut_table() -> str:
    """One checkpoint, cut to several costs."""
    result = read_result("vgg16_cut_best_many")
    rows = [
        (
            f"`--macs {cut['asked']}`",
            f"{format_macs(cut['macs'])} ({cut['macs_share']:.1%})",
            f"{cut['accuracy']:.2%}",
            f"{cut['sparse_accuracy']:.2%}",
        )
        for cut in result["values"]
    ]
    header = ["best_many, cut", "MACs", "accuracy", "in the sparse engine"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def cost_curves() -> dict[str, list[dict[str, Any]]]:
    """Accuracy against cost: checkpoints that are cut, and models trained for each cost."""
    rows = _sweep_rows("cifar100_best")

    def trained(*runs: str) -> list[dict[str, Any]]:
        dense = rows["dense"]["macs"]
        return [
            {"macs_share": rows[r]["macs"] / dense, "accuracy": rows[r]["accuracy"]} for r in runs
        ]

    def cut(run: str) -> list[dict[str, Any]]:
        points = read_result(f"vgg16_curve_{run}_refitted")["values"]
        return [point for point in points if point["accuracy"] >= LEAST_ACCURACY]

    return {
        "gated, a model for each cost": trained("best_40", "best", "best_70"),
        "thin and dense, with the same teachers": trained("thin_taught", "dense_started"),
        "thin and dense": trained("thin", "dense"),
        "one checkpoint, trained for many costs": cut("best_many"),
        "one checkpoint, trained for one": cut("best"),
    }


@functools.cache  # most tables read the same few sweeps
def _sweep_rows(name: str) -> dict[str, dict[str, Any]]:
    """The figures of each run of a sweep, over its seeds."""
    grid = read_grid(ROOT / "sweeps" / f"{name}.toml")
    return {row["run"]: row for row in summary(grid, ROOT / "results" / name)}


def _percent(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    spread = f" ± {100 * row[f'{key}_deviation']:.2f}" if f"{key}_deviation" in row else ""
    return f"{100 * row[key]:.2f}%{spread}"
