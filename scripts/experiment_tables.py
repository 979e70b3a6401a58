"""The tables of recipe.md and experiments.md: what sweeps measured, and what follows from that."""

import functools
import json
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

from result_files import ROOT, origin, read_result

from deepmoe.costs import format_macs
from deepmoe.results import markdown_table
from deepmoe.sweep import read_grid, summary

LEAST_ACCURACY = 0.6  # in the plot of costs: nobody would take what lies below


def sweep_table(name: str) -> str:
    """Mean and deviation of each run of a sweep, as far as it is done."""
    done = _sweep_rows(name)
    rows = [
        (
            row["run"],
            row["seeds"],
            _percent(row, "accuracy"),
            f"{row['evaluation_loss']:.3f}" if "evaluation_loss" in row else "",
            _percent(row, "train_accuracy"),
            format_macs(row["macs"]) if "macs" in row else "",
        )
        for row in done.values()
    ]
    results = _sweep_results(name)
    (evaluated_on,) = {_evaluated_on(result) for result in results}
    header = ["run", "seeds", f"accuracy ({evaluated_on})", "loss", "training accuracy", "MACs"]
    return f"{markdown_table(header, rows)}\n\n{origin(*results)}"


def headline_table() -> str:
    """The best recipes next to networks without gates."""
    rows = [(entry["network"], _row(entry["run"])) for entry in _comparisons()["headline"]]
    return markdown_table(
        ["network", "accuracy", "MACs", "seeds"],
        [
            (network, _percent(row, "accuracy"), format_macs(row["macs"]), row["seeds"])
            for network, row in rows
        ],
    )


def parts_table() -> str:
    """What each part of the best recipe is worth."""
    header = ["part", "points", "on", "runs (and seeds)"]
    return markdown_table(header, [(p["what"], *_measured(p)) for p in _comparisons()["parts"]])


def ingredients_table() -> str:
    """What a recipe can be made of, and what it was worth."""
    header = ["ingredient", "setting", "points", "on", "runs (and seeds)"]
    rows = [(i["what"], i["setting"], *_measured(i)) for i in _comparisons()["ingredients"]]
    return markdown_table(header, rows)


def _measured(pair: dict[str, str]) -> tuple[str, str, str]:
    """Points of accuracy between two runs, what they were evaluated on, and their names."""
    names = [pair["with"], pair["without"]]
    sweeps = [name.split("/")[0] for name in names]
    rows = [_row(name) for name in names]
    points = 100 * (rows[0]["accuracy"] - rows[1]["accuracy"])
    on = {_evaluated_on(result) for sweep in sweeps for result in _sweep_results(sweep)}
    if sweeps[0] == sweeps[1]:
        names[1] = names[1].split("/")[1]
    listed = [f"{name} ({row['seeds']})" for name, row in zip(names, rows, strict=True)]
    return f"{points:+.2f}", ", ".join(sorted(on)), " against ".join(listed)


class Target(NamedTuple):
    """What is asked for, and what is reached by which runs."""

    what: str
    runs: tuple[str, ...]
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
    percent = "{:.2f} %".format

    def cost(what: str, run: str, bound: float, *others: str) -> Target:
        return Target(what, (run, *others), macs[run], bound, at_most=True, written=format_macs)

    def gain(what: str, run: str, over: str, bound: float) -> Target:
        return Target(what, (run, over), accuracy[run] - accuracy[over], bound)

    share = 100 * macs["best"] / macs["dense"]
    error, lost = 100 - accuracy["resnet56_best"], accuracy["best"] - accuracy["best_codes"]
    targets = [
        Target("vgg16: of the dense MACs", ("best", "dense"), share, 55, True, percent),
        gain("vgg16: above the dense twin", "best", "dense", 0),
        gain("vgg16: above the thin network", "best", "thin", 1),
        cost("W13-All: MACs", "w13_best", 2.29e8),
        Target("W13-All: accuracy", ("w13_best",), accuracy["w13_best"], 73.4, written=percent),
        gain("W13-All: above dense vgg16", "w13_best", "dense", 1.5),
        cost("resnet56: MACs", "resnet56_best", macs["resnet56_dense"], "resnet56_dense"),
        Target("resnet56: error", ("resnet56_best",), error, 29.77, True, percent),
        gain("resnet56: above the dense one", "resnet56_best", "resnet56_dense", 1.5),
        Target("vgg16, 16 codes: lost by them", ("best", "best_codes"), lost, 0.5, True),
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
    result = read_result("vgg16_cut_four_many")
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


def cost_curves() -> dict[str, list[dict[str, Any]]]:
    """Accuracy against cost: checkpoints that are cut, and models trained for each cost."""
    dense = _row("cifar100_best/dense")["macs"]

    def trained(*runs: str) -> list[dict[str, Any]]:
        rows = [_row(run) for run in runs]
        return [{"macs_share": r["macs"] / dense, "accuracy": r["accuracy"]} for r in rows]

    def of_gates(*runs: str) -> list[dict[str, Any]]:
        return trained(*(f"cifar100_gates/{run}" for run in runs))

    def cut(run: str) -> list[dict[str, Any]]:
        points = read_result(f"vgg16_curve_{run}_refitted")["values"]
        return [point for point in points if point["accuracy"] >= LEAST_ACCURACY]

    return {
        "gated, a model for each cost": of_gates("four_40", "four", "four_70"),
        "the best recipe": trained("cifar100_best/best"),
        "thin with teachers, dense with start too": of_gates("thin_taught", "dense_started"),
        "thin and dense": trained("cifar100_best/thin", "cifar100_best/dense"),
        "one checkpoint, trained for many costs": cut("four_many"),
        "one checkpoint, trained for one": cut("four"),
    }


@functools.cache
def _comparisons() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads((ROOT / "docs" / "comparisons.toml").read_text(encoding="utf-8"))


def _row(name: str) -> dict[str, Any]:
    """The figures of a run, named SWEEP/RUN, over its seeds."""
    sweep, _, run = name.partition("/")
    return _sweep_rows(sweep)[run]


@functools.cache  # most tables read the same few sweeps
def _sweep_rows(name: str) -> dict[str, dict[str, Any]]:
    """The figures of each run of a sweep, over its seeds."""
    grid = read_grid(ROOT / "sweeps" / f"{name}.toml")
    return {row["run"]: row for row in summary(grid, ROOT / "results" / name)}


@functools.cache
def _sweep_results(name: str) -> list[dict[str, Any]]:
    paths = sorted((ROOT / "results" / name).glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _evaluated_on(result: dict[str, Any]) -> str:
    """Which images, and how many: so few that single points mean little, or not."""
    last = result["values"]["last"]
    return f"{last['evaluated_on']}, {last['images']:,} images"


def _percent(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    spread = f" ± {100 * row[f'{key}_deviation']:.2f}" if f"{key}_deviation" in row else ""
    return f"{100 * row[key]:.2f}%{spread}"
