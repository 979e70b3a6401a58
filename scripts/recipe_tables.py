"""The tables of recipe.md: what follows from the runs of several experiments."""

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiment_tables import evaluated_on, percent, rows_of
from result_files import experiment

from deepmoe.costs import format_macs
from deepmoe.results import markdown_table

LEAST_ACCURACY = 0.6  # in the plot of costs: nobody would take what lies below


def runs_table() -> str:
    """The best recipes next to networks without gates."""
    rows = [(entry, row_of(entry["run"])) for entry in comparisons()["runs"]]
    header = ["network", "method", "teachers", "epochs", "accuracy", "MACs", "seeds"]
    return markdown_table(
        header,
        [
            (
                *(entry[key] for key in header[:4]),
                percent(row, "accuracy"),
                format_macs(row["macs"]),
                row["seeds"],
            )
            for entry, row in rows
        ],
    )


def parts_table() -> str:
    """What each part of the best recipe is worth."""
    header = ["part", "points", "on", "runs (and seeds)"]
    return markdown_table(header, [(p["what"], *_measured(p)) for p in comparisons()["parts"]])


def ingredients_table() -> str:
    """What a recipe can be made of, and what it was worth."""
    header = ["ingredient", "setting", "points", "on", "runs (and seeds)"]
    rows = [(i["what"], i["setting"], *_measured(i)) for i in comparisons()["ingredients"]]
    return markdown_table(header, rows)


def _measured(pair: dict[str, str]) -> tuple[str, str, str]:
    """Points of accuracy between two runs, what they were evaluated on, and their names."""
    names = [pair["with"], pair["without"]]
    experiments = [name.split("/")[0] for name in names]
    rows = [row_of(name) for name in names]
    points = 100 * (rows[0]["accuracy"] - rows[1]["accuracy"])
    on = {images for name in experiments for images in evaluated_on(name)}
    if experiments[0] == experiments[1]:
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
    rows = rows_of("cifar100_best")
    accuracy = {run: 100 * row["accuracy"] for run, row in rows.items()}
    macs = {run: row["macs"] for run, row in rows.items()}
    in_percent = "{:.2f} %".format

    def cost(what: str, run: str, bound: float, *others: str) -> Target:
        return Target(what, (run, *others), macs[run], bound, at_most=True, written=format_macs)

    def gain(what: str, run: str, over: str, bound: float) -> Target:
        return Target(what, (run, over), accuracy[run] - accuracy[over], bound)

    share = 100 * macs["best"] / macs["dense"]
    error, lost = 100 - accuracy["resnet56_best"], accuracy["best"] - accuracy["best_codes"]
    targets = [
        Target("vgg16: of the dense MACs", ("best", "dense"), share, 55, True, in_percent),
        gain("vgg16: above the dense twin", "best", "dense", 0),
        gain("vgg16: above the thin network", "best", "thin", 1),
        cost("W13-All: MACs", "w13_best", 2.29e8),
        Target("W13-All: accuracy", ("w13_best",), accuracy["w13_best"], 73.4, written=in_percent),
        gain("W13-All: above dense vgg16", "w13_best", "dense", 1.5),
        cost("resnet56: MACs", "resnet56_best", macs["resnet56_dense"], "resnet56_dense"),
        Target("resnet56: error", ("resnet56_best",), error, 29.77, True, in_percent),
        gain("resnet56: above the dense one", "resnet56_best", "resnet56_dense", 1.5),
        Target("vgg16, 16 codes: lost by them", ("best", "best_codes"), lost, 0.5, True),
    ]
    seeds = {run: row["seeds"] for run, row in rows.items()}
    header = ["figure", "target", "reached", "met", "runs (and seeds)"]
    return markdown_table(header, [target.row(seeds) for target in targets])


def cost_curves() -> dict[str, list[dict[str, Any]]]:
    """Accuracy against cost: checkpoints that are cut, and models trained for each cost."""
    dense = row_of("cifar100_best/dense")["macs"]

    def trained(*runs: str) -> list[dict[str, Any]]:
        rows = [row_of(run) for run in runs]
        return [{"macs_share": r["macs"] / dense, "accuracy": r["accuracy"]} for r in rows]

    def of_gates(*runs: str) -> list[dict[str, Any]]:
        return trained(*(f"cifar100_gates/{run}" for run in runs))

    def cut(run: str) -> list[dict[str, Any]]:
        points = experiment(f"cifar100_gates/curve_{run}_refitted")["values"]
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
def comparisons() -> dict[str, list[dict[str, Any]]]:
    """Which runs the tables show, and which pairs they compare."""
    return tomllib.loads(Path(__file__).with_name("comparisons.toml").read_text(encoding="utf-8"))


def row_of(name: str) -> dict[str, Any]:
    """The figures of a run, named EXPERIMENT/RUN, over its seeds."""
    sweep, _, run = name.partition("/")
    return rows_of(sweep)[run]
