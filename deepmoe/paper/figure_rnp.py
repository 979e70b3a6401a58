"""Error against MACs of vgg16 on CIFAR-100: RNP and narrow DeepMoE."""

from deepmoe.paper.page import ERROR, MACS, MORE_TRAINING, Column, Page, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.plots import against_macs

DATA, NETWORK = "cifar100", "vgg16"
OURS = "narrow DeepMoE, ours"
# Share of the dense MACs, and of the channels that cost as much.
COSTS = {0.7: 0.82, 0.5: 0.685, 0.3: 0.52}


def rows(plan: Plan) -> list[Row]:
    """The dense network, and three costs of both methods."""
    seeds = plan.seeds(1)
    costs = dict(list(COSTS.items())[1:2]) if plan.scale.thin else COSTS

    def named(method: str, cost: str = "") -> dict[str, str]:
        return {"method": method, "asked for": cost}

    found = [Row(named("dense"), tuple(plan.dense(DATA, NETWORK, s) for s in seeds))]
    for share in costs:
        runs = tuple(plan.method(DATA, NETWORK, "rnp", share, s) for s in seeds)
        found.append(Row(named("RNP", f"{share:.0%} of the MACs"), runs, curve="RNP"))
    for share, channels in costs.items():
        runs = tuple(plan.ours(DATA, NETWORK, channels, s) for s in seeds)
        found.append(Row(named(OURS, f"{share:.0%} of the MACs"), runs, curve=OURS))
    literal = tuple(plan.literal(DATA, NETWORK, s) for s in seeds)
    return [*found, Row(named("narrow DeepMoE, literal"), literal)]


PAGE = Page(
    name="figure-rnp",
    title="error against MACs of vgg16 on CIFAR-100: RNP and narrow DeepMoE",
    data=(DATA,),
    takes={"full": "about 3 hours", "short": "about 3 min", "smoke": "3 s"},
    shortened="{epochs} epochs in one cycle in place of the paper's 350",
    rows=rows,
    columns=(ERROR, MACS, Column("share", "of dense MACs")),
    plot=against_macs,
    notes=(
        "The paper has this as a picture without figures. It says that DeepMoE's curve is flatter "
        "than RNP's, and that with 10 epochs of fine-tuning it is 4 points better than the dense "
        "VGG.",
        MORE_TRAINING,
    ),
)
