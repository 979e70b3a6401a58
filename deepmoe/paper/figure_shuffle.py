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

DATA, NETWORK, CLASS = "cifar100", "vgg16", "dolphin"
SHARE = 0.685  # of the channels: half of the dense MACs
GAP = 20.0  # points, at least: the paper has 20 to 60
SHARES = ("own", "shuffled", "in_group", "out_of_group", "gap")
SHUFFLED = {**dict.fromkeys(SHARES, float | None), "group": str | None}
MEASURES = {
    CLASS: SHUFFLED,
    "all classes": SHUFFLED,
    "classes": {str: SHUFFLED},
    "under": [(str, float, bool)],
}


def rows(plan: Plan) -> list[Row]:
    """The paper's class, and all of them, of a network by each recipe."""
    (seed, *_) = plan.seeds(1)
    networks = {
        "literal": plan.literal(DATA, NETWORK, seed),
        "ours": plan.ours(DATA, NETWORK, SHARE, seed),
    }
    return [
        Row({"recipe": recipe, "images of": part}, (run,), {"gap": GAP}, recipe, part)
        for recipe, run in networks.items()
        for part in (CLASS, "all classes")
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
    if "in_group" in figures and "out_of_group" in figures:
        figures["gap"] = figures["in_group"] - figures["out_of_group"]
    return {**figures, "group": found.group}


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
    for recipe, run in _runs(made).items():
        if run not in made.measured:
            continue
        by_group: dict[str, list[Line]] = {}
        for figures in made.measured[run].get("classes", {}).values():
            by_group.setdefault(figures.get("group") or "", []).append(figures)
        keys = ("own", "in_group", "out_of_group", "gap")
        cells = tuple(
            (group, *(_mean([line.get(key) for line in lines]) for key in keys))
            for group, lines in by_group.items()
        )
        header = ("category", *(column.title for column in PAGE.columns))
        tables.append(Shown(f"By category, {recipe}", header, cells))
    return tables


def _mean(values: list[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{np.mean(there):.2f} %" if there else "-"


def _runs(made: Made) -> dict[str, str]:
    return {line["curve"]: line["runs"][0] for line in made.lines}


def plot(made: Made) -> Figure:
    """Accuracy of the class's images under gates of each other class."""
    runs = _runs(made)
    figure = Figure(figsize=(11, 3.5 * len(runs)), layout="constrained")
    for axes, (recipe, run) in zip(figure.subplots(len(runs)), runs.items(), strict=True):
        under = sorted(made.measured.get(run, {}).get("under", []), key=lambda u: -u[1])
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
        "{epochs} epochs in one cycle in place of the paper's 350, one seed; 20 draws as there"
    ),
    rows=rows,
    columns=(
        Column("own", "own gates"),
        Column("in_group", "gates of the same category"),
        Column("out_of_group", "gates of other categories"),
        Column("gap", "same above other", "points", compared=True),
    ),
    plot=plot,
    notes=(
        "Figures are accuracies. The paper has 20 to 60 points between gates of the same and of "
        "other categories, for dolphin alone: the lower end stands in its column.",
    ),
    measure=measure,
    measures=MEASURES,
    more=more,
)
