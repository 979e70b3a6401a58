"""ResNet-56 and -110 on CIFAR-10 and -100: dense, narrow and wide."""

from functools import partial

from deepmoe.paper.page import ERROR, MACS, MORE_TRAINING, Page, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.plots import against_macs
from deepmoe.paper.sources import SOURCES

SEEDS = 3
# Of the paper: error in percent, by data, network and kind.
PAPER = {
    ("cifar10", "resnet56", "dense"): 6.55,
    ("cifar10", "resnet56", "wide"): 6.03,
    ("cifar100", "resnet56", "dense"): 31.46,
    ("cifar100", "resnet56", "wide"): 29.77,
    ("cifar100", "resnet110", "dense"): 29.45,
    ("cifar100", "resnet110", "wide"): 26.14,
}
NARROW = 0.46  # of the channels: half of the dense MACs
WIDE = 0.48  # of twice the channels: the dense MACs


def rows(plan: Plan) -> list[Row]:
    """Five kinds of every network on every data set; at the smoke scale of one on each."""
    networks: dict[str, tuple[str, ...]]
    networks = {data: ("resnet56", "resnet110") for data in ("cifar10", "cifar100")}
    if plan.scale.thin:
        networks = {"cifar10": ("resnet56",), "cifar100": ("resnet110",)}
    return [
        row for data, of in networks.items() for network in of for row in _rows(plan, data, network)
    ]


def _rows(plan: Plan, data: str, network: str) -> list[Row]:
    seeds = plan.seeds(SEEDS)
    kinds = {
        "dense": [plan.dense(data, network, s) for s in seeds],
        "wide, dense": [plan.dense(data, network, s, wide=2) for s in seeds],
        "narrow DeepMoE, ours": [plan.ours(data, network, NARROW, s) for s in seeds],
        "wide DeepMoE, ours": [plan.ours(data, network, WIDE, s, wide=2) for s in seeds],
        "wide DeepMoE, literal": [plan.literal(data, network, s, wide=2) for s in seeds],
    }
    said = {kind: PAPER.get((data, network, _kind(kind))) for kind in kinds}
    return [
        Row(
            {"data": SOURCES[data].title, "network": network, "method": kind},
            tuple(runs),
            {} if (error := said[kind]) is None else {"error": error},
            curve=f"{SOURCES[data].title}, {kind}",
        )
        for kind, runs in kinds.items()
    ]


def _kind(kind: str) -> str:
    return "wide" if kind.startswith("wide DeepMoE") else kind


PAGE = Page(
    name="table-cifar",
    title="ResNet-56 and -110 on CIFAR-10 and -100: dense, narrow and wide",
    data=("cifar10", "cifar100"),
    takes={"full": "about 30 hours", "short": "about 30 min", "smoke": "10 s"},
    shortened="{epochs} epochs in one cycle in place of the paper's 350, batches of 256",
    rows=rows,
    columns=(ERROR, MACS),
    plot=partial(against_macs, panel="data"),
    notes=(
        "Wide networks have twice the channels inside each block, and twice the MACs. In ours, "
        "about half of these channels run, so that it costs as much as the dense network; the "
        "literal recipe closes fewer. Narrow ones have the channels of the dense network; ours "
        "has half of its MACs.",
        MORE_TRAINING,
    ),
)
