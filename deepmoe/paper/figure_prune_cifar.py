"""Error against MACs of vgg16 and resnet56 on CIFAR-10: pruning methods and narrow DeepMoE."""

from functools import partial

from deepmoe.paper.page import ERROR, MACS, MORE_TRAINING, Column, Page, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.plots import against_macs

DATA = "cifar10"
OURS = "DeepMoE, ours"
METHODS = {"li": "Li", "he": "He", "thinet": "ThiNet", "sss": "SSS"}
# Of each network: share of the dense MACs, and of the channels that cost as much.
COSTS = {
    "vgg16": {0.7: 0.82, 0.5: 0.685, 0.3: 0.52},
    "resnet56": {0.7: 0.655, 0.5: 0.46, 0.3: 0.265},
}
# Networks of Li's paper, with their errors and MACs there.
LI = {
    "vgg16": {"vgg16-a": {"error": 6.60, "macs": 2.06e8}},
    "resnet56": {
        "resnet56-a": {"error": 6.90, "macs": 1.12e8},
        "resnet56-b": {"error": 6.94, "macs": 9.09e7},
    },
}
LI_DENSE = {"vgg16": {"error": 6.75, "macs": 3.13e8}, "resnet56": {"error": 6.96, "macs": 1.25e8}}
HE = {("resnet56", 0.5): {"error": 8.2}}  # 91.8 % at half of the MACs


def rows(plan: Plan) -> list[Row]:
    """Every method at every cost, for both networks."""
    networks = ("vgg16",) if plan.scale.thin else tuple(COSTS)
    return [row for network in networks for row in _rows(plan, network)]


def _rows(plan: Plan, network: str) -> list[Row]:
    seeds = plan.seeds(1)
    costs = {0.5: COSTS[network][0.5]} if plan.scale.thin else COSTS[network]

    def named(method: str, cost: str = "") -> dict[str, str]:
        return {"network": network, "method": method, "asked for": cost}

    dense = tuple(plan.dense(DATA, network, s) for s in seeds)
    found = [Row(named("dense"), dense, LI_DENSE[network])]
    for setting, paper in LI[network].items():
        runs = tuple(plan.method(DATA, network, "li", 1.0, s, setting=setting) for s in seeds)
        curve = f"{network}, Li, published settings"
        found.append(Row(named("Li, L1 filter norms", f"Li's {setting}"), runs, paper, curve))
    for method, title in METHODS.items():
        for share in costs:
            runs = tuple(plan.method(DATA, network, method, share, s) for s in seeds)
            paper = HE.get((network, share), {}) if method == "he" else {}
            label = named(title, f"{share:.0%} of the MACs")
            found.append(Row(label, runs, paper, f"{network}, {title}"))
    for share, channels in costs.items():
        runs = tuple(plan.ours(DATA, network, channels, s) for s in seeds)
        label = named(OURS, f"{share:.0%} of the MACs")
        found.append(Row(label, runs, curve=f"{network}, {OURS}"))
    literal = tuple(plan.literal(DATA, network, s) for s in seeds)
    return [*found, Row(named("DeepMoE, literal"), literal)]


PAGE = Page(
    name="figure-prune-cifar",
    title="error against MACs of vgg16 and resnet56 on CIFAR-10: pruning and narrow DeepMoE",
    data=(DATA,),
    takes={"full": "about 6 hours", "short": "about 5 min", "smoke": "5 s"},
    shortened=(
        "{epochs} epochs in one cycle for the start and again for each method, in place of 350 "
        "and each method's own schedule"
    ),
    rows=rows,
    columns=(ERROR, MACS, Column("share", "of dense MACs")),
    plot=partial(against_macs, panel="network"),
    notes=(
        "DeepMoE's paper has this as a picture without figures: those in the columns of the paper "
        "are Li's and He's own, and the best test epoch in Li's case.",
        MORE_TRAINING,
    ),
)
