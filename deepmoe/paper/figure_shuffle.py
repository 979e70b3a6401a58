"""Gates of other classes, in and out of the coarse category: vgg16 on CIFAR-100."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepmoe.data.coarse_groups import coarse_groups
from deepmoe.evaluation.shuffling import DRAWS, ClassShuffling, Shuffling, shuffle_gates
from deepmoe.paper.measured import opened
from deepmoe.paper.page import Column, Line, Made, Page, Row, Shown
from deepmoe.paper.plan import Plan
from deepmoe.paper.tables import shown

DATA, NETWORK, CLASS = "cifar100", "vgg16", "dolphin"
SHARE = 0.685  # of the channels: half of the dense MACs
GAP = 20.0  # points, at least: the paper has 20 to 60
SHARES = ("own", "shuffled", "followed", "in_group", "out_of_group", "gap")
SHUFFLED = {**dict.fromkeys(SHARES, float | None), "group": str | None}
MEASURES = {
    CLASS: SHUFFLED,
    "all classes": SHUFFLED,
    "classes": {str: SHUFFLED},
    "under": [(str, float, bool)],
}


def rows(plan: Plan) -> list[Row]:
    """The paper's class, and all of them, of a network by each recipe."""
    seeds = plan.seeds(1)
    networks = {
        "literal": [plan.literal(DATA, NETWORK, s) for s in seeds],
        "ours": [plan.ours(DATA, NETWORK, SHARE, s) for s in seeds],
    }
    return [
        Row({"recipe": recipe, "images of": part}, tuple(runs), paper, recipe, part)
        for recipe, runs in networks.items()
        for part, paper in ((CLASS, {"gap": GAP}), ("all classes", {}))
    ]


def measure(path: Path, plan: Plan) -> Line:
    """Shuffles the gates of one class by every other, and of all classes by some."""
    draws = 1 if plan.scale.thin else DRAWS
    with opened(path, plan, DATA) as (loaded, source):
        model, names = loaded.model, loaded.info.class_names
        groups, images = coarse_groups(names), source.evaluation
        all_others = draws * (len(names) - 1)
        one = shuffle_gates(model, images, names, groups=groups, draws=all_others, only=CLASS)
        every = shuffle_gates(model, images, names, groups=groups, draws=draws)
    return {
        CLASS: _percent(one.of_class(CLASS)),
        "all classes": _percent(every.total),
        "classes": {name: _percent(every.of_class(name)) for name in names},
        "under": _under(one, groups),
    }


def _percent(found: ClassShuffling) -> Line:
    figures = {k: 100 * v for k, v in asdict(found).items() if isinstance(v, float)}
    return {**_with_gap(figures), "group": found.group}


def _with_gap(figures: Line) -> Line:
    if "in_group" in figures and "out_of_group" in figures:
        return {**figures, "gap": figures["in_group"] - figures["out_of_group"]}
    return figures


def _under(found: Shuffling, groups: tuple[str, ...] | None) -> list[list[Any]]:
    """Accuracy of the class's images under gates of each other one, and whether that is alike."""
    place = found.class_names.index(CLASS)
    alike = [groups is not None and group == groups[place] for group in groups or found.class_names]
    return [
        [name, 100 * float(accuracy), same]
        for name, accuracy, same in zip(
            found.class_names, found.accuracy[place], alike, strict=True
        )
        if not np.isnan(accuracy)
    ]


def more(made: Made) -> list[Shown]:
    """All classes, by coarse category."""
    tables = []
    for recipe, measured in _measured(made).items():
        by_group: dict[str, list[Line]] = {}
        for figures in (line for of_run in measured for line in of_run["classes"].values()):
            by_group.setdefault(figures.get("group") or "", []).append(figures)
        lines = [
            {"labels": {"category": group}, "paper": {}, "seeds": len(measured), **_means(classes)}
            for group, classes in by_group.items()
        ]
        if lines:
            tables.append(shown(f"By category, {recipe}", PAGE.columns, lines))
    return tables


def _means(lines: list[Line]) -> Line:
    found = {key: [line[key] for line in lines if key in line] for key in SHARES}
    return _with_gap({key: float(np.mean(values)) for key, values in found.items() if values})


def _measured(made: Made) -> dict[str, list[Line]]:
    """What was measured of each recipe's runs, of all seeds."""
    runs = {line["curve"]: line["runs"] for line in made.lines}
    return {
        recipe: [made.measured[run] for run in of_recipe if run in made.measured]
        for recipe, of_recipe in runs.items()
    }


def plot(made: Made) -> Figure:
    """Accuracy of the class's images under gates of each other class, the mean over seeds."""
    recipes = _measured(made)
    figure = Figure(figsize=(11, 3.5 * len(recipes)), layout="constrained")
    for axes, (recipe, measured) in zip(
        figure.subplots(len(recipes)), recipes.items(), strict=True
    ):
        found: dict[tuple[str, bool], list[float]] = {}
        for name, value, same in (under for line in measured for under in line["under"]):
            found.setdefault((name, same), []).append(value)
        under = sorted(((n, np.mean(v), s) for (n, s), v in found.items()), key=lambda u: -u[1])
        colours = ["C1" if same else "C0" for _, _, same in under]
        axes.bar([name for name, *_ in under], [value for _, value, _ in under], color=colours)
        axes.tick_params(axis="x", rotation=90, labelsize=5)
        axes.set(ylabel=f"{CLASS}: accuracy, %", title=f"{recipe} (orange: same category)")
    return figure


PAGE = Page(
    name="figure-shuffle",
    title="vgg16 on CIFAR-100 under gates of other classes, in and out of the coarse category",
    data=(DATA,),
    takes={"full": "about 2 hours", "short": "about 2 min", "smoke": "3 s"},
    shortened=(
        "{epochs} epochs in one cycle in place of the paper's 350; 20 draws, as in the paper"
    ),
    rows=rows,
    columns=(
        Column("own", "own gates"),
        Column("in_group", "gates of the same category"),
        Column("out_of_group", "gates of other categories"),
        Column("gap", "same above other", "points", compared=True),
        Column("followed", "answers that are the class of the gates"),
    ),
    plot=plot,
    notes=(
        "Figures are accuracies. Between gates of the same and of other categories the paper has "
        "20 to 60 points, for dolphin alone; its column shows 20, the least.",
    ),
    measure=measure,
    measures=MEASURES,
    more=more,
)
