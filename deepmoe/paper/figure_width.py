"""resnet18_cifar with bottleneck-B on CIFAR-100, widened 2 to 8 times."""

from deepmoe.paper.page import ERROR, MACS, MORE_TRAINING, Page, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.plots import against_macs

DATA, NETWORK = "cifar100", "resnet18-b"
SEEDS = 3
LAMBDA = 2.0  # of the paper, for this figure
# Factor, and the share of the channels that costs what the network costs unwidened.
WIDTHS = {2: 0.49, 4: 0.245, 8: 0.12}
DENSE = "dense"


def rows(plan: Plan) -> list[Row]:
    """The plain widened network, and DeepMoE by both recipes, of each width; the normal width."""
    seeds, widths = plan.seeds(SEEDS), dict(list(WIDTHS.items())[: 1 if plan.scale.thin else None])
    kinds = {
        DENSE: lambda wide, seed: plan.dense(DATA, NETWORK, seed, wide=wide),
        "DeepMoE, ours": lambda wide, seed: plan.ours(DATA, NETWORK, widths[wide], seed, wide=wide),
        "DeepMoE, literal": lambda wide, seed: plan.literal(
            DATA, NETWORK, seed, wide=wide, mean_sparsity=LAMBDA
        ),
    }
    wanted = [(1, DENSE), *((wide, kind) for wide in widths for kind in kinds)]
    return [
        Row(
            {"widened by": str(wide), "method": kind},
            tuple(kinds[kind](wide, s) for s in seeds),
            curve=kind,
        )
        for wide, kind in wanted
    ]


PAGE = Page(
    name="figure-width",
    title="ResNet-18 with bottleneck-B on CIFAR-100, widened 2 to 8 times, lambda 2",
    data=(DATA,),
    takes={"full": "about 24 hours", "short": "about 12 min", "smoke": "3 s"},
    shortened="{epochs} epochs in one cycle in place of the paper's 350, widths 2, 4 and 8",
    rows=rows,
    columns=(ERROR, MACS),
    plot=against_macs,
    notes=(
        "The paper has this as a picture without figures. It says that DeepMoE is more accurate "
        "and cheaper than the plain widened network, and the more so the wider it is. Ours "
        "costs as much as the network of normal width (728 M MACs).",
        MORE_TRAINING,
    ),
)
