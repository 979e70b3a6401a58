"""The tables and the plot of docs/exits.md."""

import statistics
from typing import Any

import numpy as np
from recipe_tables import Target
from result_files import benchmark, experiment, origin

from deepmoe.costs import format_macs
from deepmoe.results import markdown_table

FRONT, VOTE = "cifar100_exits/front", "cifar100_vote/front"
# Of CIFAR-100, thin networks were measured first, gates and resnet56 later.
WHOLE, WHOLE_GATES = "cifar100_front/front", "cifar100_front/front_gates"
WHOLE_CIFAR10 = "cifar10_front/front"
VOTED = (0.09, 0.12, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45)  # of the dense MACs
WIDTHS = {"vgg16_3": "32-32-64-128", "vgg16_12": "64-64-128-256", "vgg16_30": "64-128-256-512"}
SHOWN = (0.03, 0.06, 0.09, 0.11, 0.12, 0.2, 0.23, 0.3, 0.4, 0.54)  # of the dense MACs
KINDS = {"embedding": "embedding", "network": "narrow network"}
WHOLE_KINDS = {
    "gates": "the paper's gates",
    "thin": "thin, from scratch",
    "pruned": "pruned alone",
    "embedding": "exits, embedding first",
    "network": "exits, narrow network first",
}
HEADLINE_SHARES = (0.1, 0.62)  # of the dense MACs, in the README's plot
WITHIN = 0.001  # accuracies that are taken to be equal
PUBLISHED = {34: (74.5, "BoostNet"), 72: (76.0, "L2W"), 109: (76.0, "L2W, at 72 M")}
SPEED = {  # the stages of each measurement
    "exits_cpu_cascade_1": "vgg16 at 9%, at 54%",
    "exits_cpu_cascade_2": "vgg16 at 9%, at 54%",
    "exits_cpu_vgg16_54": "embedding, vgg16 at 54%",
    "exits_cpu_vgg16_30": "embedding, vgg16 at 30%",
    "exits_gpu_vgg16_54": "embedding, vgg16 at 54%",
    "exits_gpu_vgg16_100": "embedding, vgg16",
    "exits_gpu_resnet18_180": "embedding, resnet18 at 180 M",
}


def front_table() -> str:
    """vgg16 at several costs: pruned alone, and behind either kind of first stage."""
    found, rows = experiment(FRONT), []
    for point in _points():
        pairs = [point.get(kind) for kind in KINDS]
        gains = ["" if pair is None else f"{_gain(pair):+.2f}" for pair in pairs]
        accuracies = ["" if pair is None else _accuracy(pair) for pair in pairs]
        alone = _static().get(_group(point["share"]))
        cells = ["" if alone is None else _accuracy(alone), *accuracies, *gains]
        rows.append((f"{point['share']:.0%}", *cells))
    header = ["of dense MACs, at most", "pruned alone", "embedding first", "narrow network first"]
    header += ["gain of the embedding", "gain of the narrow network"]
    return f"{markdown_table(header, rows)}\n\n{origin(found)}"


def whole_front_table() -> str:
    """Thin networks and gates beside pruning and exits: both data sets, both networks."""
    rows = []
    for data, network, points in _whole_front():
        for point in points:
            cells = [_accuracy(point[kind]) if kind in point else "" for kind in WHOLE_KINDS]
            rows.append((f"{data}, {network}", f"{point['share']:.0%}", *cells))
    header = ["data, network", "of dense MACs", *WHOLE_KINDS.values()]
    found = (experiment(name) for name in (FRONT, WHOLE, WHOLE_GATES, WHOLE_CIFAR10))
    return f"{markdown_table(header, rows)}\n\n{origin(*found)}"


def _whole_front() -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Data, network, and what was measured at each cost.

    Of vgg16 on CIFAR-100, pruned networks and those with exits are runs of an experiment before.
    """
    before = {p["share"]: p for p in experiment(FRONT)["values"]["vgg16"]}
    joined = [
        {**point, "pruned": pruned(_group(share)), **before.get(share, {})}
        for point in _trained("vgg16")
        for share in [point["share"]]
    ]
    return [
        ("CIFAR-100", "vgg16", joined),
        ("CIFAR-100", "resnet56", _trained("resnet56")),
        ("CIFAR-10", "vgg16", experiment(WHOLE_CIFAR10)["values"]["vgg16"]),
    ]


def _trained(network: str) -> list[dict[str, Any]]:
    """Of CIFAR-100: each cost that has a thin network or exits, with all that was measured."""
    points: dict[float, dict[str, Any]] = {}
    for name in (WHOLE, WHOLE_GATES):
        for point in experiment(name)["values"][network]:
            points.setdefault(point["share"], {}).update(point)
    return [points[share] for share in sorted(points) if {"thin", "embedding"} & {*points[share]}]


def pairs_table() -> str:
    """What the models of the front consist of."""
    rows = [
        (f"{point['share']:.0%}", *_pair_cells(point[kind]))
        for point in _points()
        for kind in KINDS
        if kind in point
    ]
    header = ["of dense MACs, at most", "first stage", "second stage", "exit rate", "mean MACs"]
    return markdown_table([*header, "accuracy", "pairs tried"], rows)


def vote_table() -> str:
    """What it is worth that the first stage has a say on images that go on."""
    found, rows = experiment(VOTE), []
    alone = {row["run"]: row for row in found["values"]["static"]}
    for point in found["values"]["vgg16"]:
        if point["share"] not in VOTED:
            continue
        cells = [
            _accuracy(point[name]) if name in point else ""
            for kind in ("network", "embedding")
            for name in (f"{kind}_without_vote", kind)
        ]
        static = alone.get(_group(point["share"]))
        rows.append((f"{point['share']:.0%}", "" if static is None else _accuracy(static), *cells))
    header = ["of dense MACs, at most", "pruned alone", "narrow network first", "narrow, with vote"]
    table = markdown_table([*header, "embedding first", "embedding, with vote"], rows)
    return f"{table}\n\n{origin(found)}"


def criteria_table() -> str:
    """By what a vote is best chosen."""
    found, names = experiment("cifar100_vote/criteria"), {}
    for row in found["values"]:
        kind = "embedding of " if row["by"] == "embedding" else ""
        stages = f"{kind}{row['first']}, {row['base']}"
        names[stages, len(row["seeds"])] = row["accuracy"]
    header = ["stages", "seeds", *next(iter(names.values()))]
    rows = [(*key, *(f"{a:.1%}" for a in means.values())) for key, means in names.items()]
    return f"{markdown_table(header, rows)}\n\n{origin(found)}"


def field_table() -> str:
    """resnet18, pruned, at the costs of published early-exit networks."""
    found = experiment(FRONT)
    rows = [
        (f"{point['millions']} M", *_pair_cells(point[kind])[:-1], f"{accuracy:.1f}% ({method})")
        for point in found["values"]["resnet18"]
        for accuracy, method in [PUBLISHED[point["millions"]]]
        for kind in KINDS
        if kind in point
    ]
    header = ["MACs, at most", "first stage", "second stage", "exit rate", "mean MACs", "accuracy"]
    return f"{markdown_table([*header, 'published'], rows)}\n\n{origin(found)}"


def embedding_table() -> str:
    """How good first stages are, for what they cost."""
    static, rows = _static(), []
    for run, widths in WIDTHS.items():
        macs, accuracies = static[run]["embedding_macs"], static[run]["embedding_accuracy"]
        rows.append((macs, f"embedding, `embedding.widths` {widths}", accuracies))
    for run in ("vgg16_3", "vgg16_6", "vgg16_12"):
        rows.append(
            (static[run]["macs"], f"narrow network, {_named(run)}", static[run]["accuracy"])
        )
    cells = [(name, format_macs(macs), _mean_and_deviation(a)) for macs, name, a in sorted(rows)]
    table = markdown_table(["first stage", "MACs", "accuracy"], cells)
    return f"{table}\n\n{origin(experiment(FRONT))}"


def targets_table() -> str:
    """What exits were to reach, and what they reach."""
    points = {point["share"]: point for point in experiment(FRONT)["values"]["vgg16"]}
    fields = {point["millions"]: point for point in experiment(FRONT)["values"]["resnet18"]}
    in_percent = "{:.2f} %".format

    def best(point: dict[str, Any]) -> dict[str, Any]:
        kinds = [point[kind] for kind in KINDS if kind in point]
        return max(kinds, key=lambda pair: statistics.fmean(pair["holdout_accuracy"]))

    def accuracy(point: dict[str, Any]) -> float:
        return 100 * statistics.fmean(best(point)["accuracy"])

    gains = ((0.06, 1.5), (0.09, 1.5), (0.12, 1.0), (0.2, 1.0))
    fronts = ((0.11, 70.5), (0.23, 72.5), (0.4, 73.9))
    targets = [
        *(Target(f"vgg16, {s:.0%}: gain", (), _gain(best(points[s])), bound) for s, bound in gains),
        *(
            Target(f"vgg16, {s:.0%}", (), accuracy(points[s]), bound, written=in_percent)
            for s, bound in fronts
        ),
        *(
            Target(f"resnet18, {m} M", (), accuracy(fields[m]), bound, written=in_percent)
            for m, (bound, _) in PUBLISHED.items()
        ),
    ]
    rows = [target.row({})[:4] for target in targets]
    return markdown_table(["figure", "target", "reached", "met"], rows)


def cheapest_pair(name: str) -> dict[str, Any]:
    """The cheapest model with exits that is about as accurate as a pruned network."""
    enough = statistics.fmean(pruned(name)["accuracy"]) - WITHIN
    good = [
        point[kind]
        for point in experiment(FRONT)["values"]["vgg16"]
        for kind in KINDS
        if kind in point and statistics.fmean(point[kind]["accuracy"]) >= enough
    ]
    return min(good, key=lambda pair: statistics.fmean(pair["macs"]))


def pruned(name: str) -> dict[str, Any]:
    """A pruned network without exits, by the name of its run."""
    return _static()[name]


def voted(name: str) -> dict[str, Any]:
    """Of the runs with a vote: a pruned network by its name, or exits for a cost, as `35 %`."""
    values = experiment(VOTE)["values"]
    if name.endswith(" %"):
        share = int(name.removesuffix(" %")) / 100
        return next(point for point in values["vgg16"] if point["share"] == share)["network"]
    return {row["run"]: row for row in values["static"]}[name]


def thin(name: str) -> dict[str, Any]:
    """A thin vgg16 from scratch, by the name of its run."""
    return {point["thin"]["run"]: point["thin"] for point in _trained("vgg16")}[name]


def saved_table() -> str:
    """How much cheaper a model with exits is than a pruned network of its accuracy."""
    rows = []
    for name in ("vgg16_12", "vgg16_20", "vgg16_30", "vgg16_40", "vgg16_54"):
        alone, pair = pruned(name), cheapest_pair(name)
        first, second, _, _, accuracy, _ = _pair_cells(pair)
        saved = f"{1 - statistics.fmean(pair['macs']) / alone['macs']:.0%}"
        rows.append((_named(name), _accuracy(alone), first, second, accuracy, saved))
    header = ["pruned alone", "its accuracy", "first stage", "second stage", "accuracy"]
    return markdown_table([*header, "MACs saved"], rows)


def speed_table() -> str:
    """Time with exits and without, of the same network."""
    rows, results = [], [benchmark(name) for name in SPEED]
    for network, result in zip(SPEED.values(), results, strict=True):
        for case in result["values"]:
            threads = "1 thread" if case["threads"] == 1 else f"{case['threads']} threads"
            on = "GPU" if case["device"].startswith("cuda") else f"CPU, {threads}"
            ways = ("without", "_without"), ("with", "")
            figures = [
                f"{case[key + end] * factor:.{digits}f}"
                for key, factor, digits in (("accuracy", 100, 2), ("ms", 1, 2))
                for _, end in ways
            ]
            cells = (f"{case['exited']:.0%}", *figures, f"{1 / case['ratio'] - 1:+.0%}")
            rows.append((network, on, case["batch"], *cells))
    header = ["stages", "on", "batch", "exit rate", "accuracy without exits, %", "with, %"]
    header += ["ms a batch without exits", "with", "throughput"]
    return f"{markdown_table(header, rows)}\n\n{origin(*({**r, 'command': ''} for r in results))}"


def front_curves() -> dict[str, list[dict[str, Any]]]:
    """Accuracy against cost, for the plot."""
    values = experiment(FRONT)["values"]
    alone = [row for run, row in _static().items() if run.startswith("vgg16_")]
    dense = _static()["vgg16_100"]["macs"]
    thin = [point["thin"] for point in _trained("vgg16")]
    curves = {
        name: [_point(row["macs"], dense, row["accuracy"]) for row in rows]
        for name, rows in (("pruned alone", alone), ("thin, from scratch", thin))
    }
    for kind, name in KINDS.items():
        pairs = [point[kind] for point in values["vgg16"] if kind in point]
        curves[f"{name} first"] = [
            _point(statistics.fmean(pair["macs"]), dense, pair["accuracy"]) for pair in pairs
        ]
    return curves


def whole_curves(data: str, network: str) -> dict[str, list[dict[str, Any]]]:
    """The same of a network in the table of all kinds, with gates."""
    (points,) = (points for *name, points in _whole_front() if name == [data, network])
    dense = points[0]["thin"]["macs"] / points[0]["thin"]["macs_share"]
    return {
        title: [
            _point(_mean(point[kind]["macs"]), dense, point[kind]["accuracy"])
            for point in points
            if kind in point
        ]
        for kind, title in WHOLE_KINDS.items()
    }


def headline_curves() -> dict[str, list[dict[str, Any]]]:
    """The same for the README: static and ours, where the curves bend."""
    curves = front_curves()
    names = {"pruned alone": "static pruning", "narrow network first": "pruning and early exits"}
    low, high = HEADLINE_SHARES
    return {
        title: [point for point in curves[name] if low <= point["macs_share"] <= high]
        for name, title in names.items()
    }


def _mean(macs: float | list[float]) -> float:
    """Of all seeds, for models whose cost depends on them."""
    return statistics.fmean(macs) if isinstance(macs, list) else macs


def _point(macs: float, dense: float, accuracies: list[float]) -> dict[str, Any]:
    return {"macs_share": macs / dense, "accuracy": statistics.fmean(accuracies)}


def _points() -> list[dict[str, Any]]:
    """The costs of the front that are shown."""
    return [p for p in experiment(FRONT)["values"]["vgg16"] if p["share"] in SHOWN]


def _static() -> dict[str, dict[str, Any]]:
    """Pruned networks, by the names of their runs; vgg16's from small to large."""
    return {row["run"]: row for row in experiment(FRONT)["values"]["static"]}


def _group(share: float) -> str:
    return f"vgg16_{100 * share:g}"


def _named(run: str) -> str:
    """A pruned network as a reader would call it."""
    row = _static()[run]
    if run.startswith("vgg16"):
        return f"vgg16 at {row['macs_share']:.0%}"
    return f"resnet18 at {row['macs'] / 1e6:.0f} M"


def _pair_cells(pair: dict[str, Any]) -> tuple[str, ...]:
    """First and second stage, exit rate, mean MACs, accuracy, and how many pairs were tried."""
    macs, exited = (statistics.fmean(pair[key]) for key in ("macs", "exited"))
    first = pair["looks_first"]
    looks = f"embedding {WIDTHS[first]}" if pair["by"] == "embedding" else _named(first)
    cells = (f"{exited:.0%}", format_macs(macs), _accuracy(pair), str(pair["tried"]))
    return looks, _named(pair["base"]), *cells


def _accuracy(row: dict[str, Any]) -> str:
    return _mean_and_deviation(row["accuracy"])


def _gain(pair: dict[str, Any]) -> float:
    """Points above a pruned vgg16 of the same mean MACs: linear between those that were trained."""
    alone = [row for run, row in _static().items() if run.startswith("vgg16_")]
    costs = [row["macs"] for row in alone]
    accuracies = [statistics.fmean(row["accuracy"]) for row in alone]
    macs = statistics.fmean(pair["macs"])
    return 100 * (statistics.fmean(pair["accuracy"]) - float(np.interp(macs, costs, accuracies)))


def _mean_and_deviation(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.2f}% ± {100 * statistics.stdev(values):.2f}"
