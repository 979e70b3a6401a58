"""Expressive power: the paper's bound, and the routes that trained networks do take."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from deepmoe.evaluation import collect_gates
from deepmoe.evaluation.routes import count_routes
from deepmoe.paper.measured import opened
from deepmoe.paper.page import Column, Line, Made, Page, Row
from deepmoe.paper.plan import Plan

DATA, NETWORK = "cifar100", "vgg16"
WIDE, WIDE_SHARE = "vgg16-w13-all", 0.515
SHARE = 0.685  # of the channels: half of the dense MACs
SHOWN_WIDTHS = (8, 16, 64)
MEASURES = {
    **dict.fromkeys(("images", "channels", "distinct", "rank", "always", "never"), int),
    "log10_miss": float,
    "layers": [{"name": str, "channels": int, "distinct": int, "rank": int}],
}


def log10_miss(widths: Sequence[int], active: Sequence[int]) -> float:
    """By how much data-dependent selection may fall short of the full rank, as a power of ten.

    The paper: choosing n of m channels in each of L layers for each image keeps the rank m^(2^L)
    with probability 1 - C(m, n)^(-L). For layers that differ, the power becomes a product.

    Args:
        widths: m of each layer.
        active: n of each layer.

    Returns:
        The logarithm of C(m, n)^(-L): -30 stands for a probability of 1 - 1e-30.
    """
    return -sum(
        math.log10(math.comb(m, n)) if 0 <= n <= m else 0.0
        for m, n in zip(widths, active, strict=True)
    )


def rows(plan: Plan) -> list[Row]:
    """Narrow networks of both recipes, and a wide one."""
    seeds = plan.seeds(1)
    networks = {
        ("vgg16", "DeepMoE, literal"): [plan.literal(DATA, NETWORK, s) for s in seeds],
        ("vgg16", "DeepMoE, ours"): [plan.ours(DATA, NETWORK, SHARE, s) for s in seeds],
        ("W13-All", "DeepMoE, literal"): [plan.literal(DATA, WIDE, s) for s in seeds],
        ("W13-All", "DeepMoE, ours"): [plan.ours(DATA, WIDE, WIDE_SHARE, s) for s in seeds],
    }
    return [
        Row({"network": network, "method": method}, tuple(runs))
        for (network, method), runs in networks.items()
    ]


def measure(path: Path, plan: Plan) -> Line:
    """Routes and ranks on the test images, and the bound for as many channels."""
    with opened(path, plan, DATA) as (loaded, source):
        record = collect_gates(loaded.model, source.evaluation, loaded.info.class_names)
    routes = count_routes(record)
    widths = [gates.shape[1] for gates in record.gates]
    active = [round(float((gates != 0).sum(axis=1).mean())) for gates in record.gates]
    return {
        "images": routes.images,
        "channels": routes.joined.channels,
        "distinct": routes.distinct,
        "rank": routes.joined.rank,
        "always": routes.joined.always,
        "never": routes.joined.never,
        "log10_miss": log10_miss(widths, active),
        "layers": [
            {"name": r.name, "channels": r.channels, "distinct": r.distinct, "rank": r.rank}
            for r in routes.layers
        ],
    }


def plot(made: Made) -> Figure:
    """The bound over the number of layers; ranks of the first seed's patterns by layer."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    bound, ranks = figure.subplots(1, 2)
    depths = range(1, 17)
    for width in SHOWN_WIDTHS:
        misses = [log10_miss([width] * depth, [width // 2] * depth) for depth in depths]
        bound.plot(list(depths), misses, label=f"{width // 2} of {width} channels")
    bound.set(xlabel="layers", ylabel="bound: log10 of the probability to lose rank")
    bound.legend(fontsize=8)
    for line in made.lines:
        found = made.measured.get(line["runs"][0], {}).get("layers", [])
        ranks.plot(
            [r["rank"] / max(1, r["channels"]) for r in found], marker="o", label=line["row"]
        )
    ranks.set(xlabel="gated convolution", ylabel="rank of the gate patterns, of the channels")
    ranks.legend(fontsize=8)
    return figure


PAGE = Page(
    name="figure-expressive",
    title="the paper's bound on expressive power, and the routes that networks do take",
    data=(DATA,),
    takes={"full": "about 3 hours", "short": "about 3 min", "smoke": "3 s"},
    shortened="{epochs} epochs in one cycle in place of the paper's 350",
    rows=rows,
    columns=(
        Column("images", "images", "count"),
        Column("distinct", "distinct routes", "count"),
        Column("channels", "gated channels", "count"),
        Column("always", "channels that always run", "count"),
        Column("never", "channels that never run", "count"),
        Column("rank", "rank of the gate patterns", "count"),
        Column("log10_miss", "bound: log10 of the probability to lose rank", "count"),
    ),
    plot=plot,
    notes=(
        "The paper has a bound, and measures nothing: choosing n of m channels in L layers for "
        "each image keeps the rank m^(2^L) with probability 1 - C(m, n)^(-L), if choices are "
        "random and independent. Where a network's routes are few or its patterns have a low "
        "rank, they are not. n is the mean number of open gates here. The rank of gate patterns "
        "is that of a matrix with a row an image, 1 where a channel runs; the bound is about the "
        "rank of the network's tensor, which can't be measured.",
    ),
    measure=measure,
    measures=MEASURES,
)
