"""Where to widen vgg16 on CIFAR-100: four strategies, by parameters and by MACs."""

from matplotlib.figure import Figure

from deepmoe.paper.page import MACS, MORE_TRAINING, Column, Made, Page, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.plots import against_macs

DATA, SEEDS = "cifar100", 3
# Accuracy at equal parameters, and the dense MACs; accuracy at equal parameters and MACs, and
# these; the share of the channels that costs as much.
STRATEGIES = {
    "w1-high": ("W1-High", 71.96, 3.51e8, 73.28, 2.98e8, 0.91),
    "w1-mid": ("W1-Mid", 72.02, 9.18e8, 72.68, 2.74e8, 0.535),
    "w4-low": ("W4-Low", 72.51, 43.16e8, 73.33, 2.45e8, 0.23),
    "w13-all": ("W13-All", 73.91, 8.15e8, 73.39, 2.29e8, 0.515),
}


def rows(plan: Plan) -> list[Row]:
    """The widened network by parameters, then DeepMoE brought to the paper's MACs."""
    seeds, few = plan.seeds(SEEDS), ("w4-low", "w13-all")
    strategies = {k: v for k, v in STRATEGIES.items() if k in few or not plan.scale.thin}
    plain = tuple(plan.dense(DATA, "vgg16", s) for s in seeds)
    found = [Row({"widening": "none", "method": "dense"}, plain, curve="dense")]
    for key, (title, dense, dense_macs, gated, gated_macs, share) in strategies.items():
        network = f"vgg16-{key}"
        by_parameters = {"accuracy": dense, "macs": dense_macs}
        by_macs = {"accuracy": gated, "macs": gated_macs}
        kinds = {
            "dense": ([plan.dense(DATA, network, s) for s in seeds], by_parameters),
            "DeepMoE, ours": ([plan.ours(DATA, network, share, s) for s in seeds], by_macs),
            "DeepMoE, literal": ([plan.literal(DATA, network, s) for s in seeds], by_macs),
        }
        found += [
            Row({"widening": title, "method": kind}, tuple(runs), paper, kind)
            for kind, (runs, paper) in kinds.items()
        ]
    return found


def plot(made: Made) -> Figure:
    """Accuracy against MACs."""
    return against_macs(made, "accuracy", "accuracy, %")


PAGE = Page(
    name="table-widening",
    title="vgg16 on CIFAR-100 widened in four ways: by parameters, and by MACs",
    data=(DATA,),
    takes={"full": "about 12 hours", "short": "about 12 min", "smoke": "5 s"},
    shortened="{epochs} epochs in one cycle in place of the paper's 350, batches of 256",
    rows=rows,
    columns=(Column("accuracy", "accuracy", compared=True), MACS),
    plot=plot,
    notes=(
        "All four have about 24.2 M weights in convolutions. The paper's accuracy at equal "
        "parameters stands beside the widened network without gates, its accuracy at equal "
        "parameters and MACs beside DeepMoE. The paper does not say which networks the former are "
        "of.",
        MORE_TRAINING,
    ),
)
