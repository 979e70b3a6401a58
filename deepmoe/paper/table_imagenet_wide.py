"""ResNet-18, -34 and -50 on ImageNet, widened, and Hard MoE."""

from deepmoe.paper.page import ERROR, MACS, MORE_TRAINING, Page, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.plots import against_macs

DATA = "imagenet"
# Title, network, block of the wide one, share of its channels that run, the paper's errors.
WIDE = (
    ("ResNet-18", "resnet18", "resnet18", 0.475, 30.24, 29.05),
    ("ResNet-34", "resnet34", "resnet34", 0.485, 26.70, 25.87),
    ("ResNet-50 (A)", "resnet50", "resnet50", 0.665, 23.85, 22.88),
    ("ResNet-50 (B)", "resnet50", "resnet50-b", 0.915, 23.85, 22.84),
)
HARD_MOE, RESNET101 = 30.43, 22.63
RESNET101_MACS = 7.80e9
DEEPMOE_MACS = {"resnet50": 0.80 * RESNET101_MACS, "resnet50-b": 0.82 * RESNET101_MACS}


def rows(plan: Plan) -> list[Row]:
    """Dense, wide dense, and wide DeepMoE by both recipes."""
    found, seeds = [], plan.seeds(1)
    for title, network, block, share, dense, wide in WIDE:
        if plan.scale.thin and network == "resnet34":
            continue  # the same network as resnet18 there
        kinds = {
            "dense": ([plan.dense(DATA, network, s) for s in seeds], dense),
            "wide, dense": ([plan.dense(DATA, block, s, wide=2) for s in seeds], None),
            "wide DeepMoE, ours": ([plan.ours(DATA, block, share, s, wide=2) for s in seeds], wide),
            "wide DeepMoE, literal": ([plan.literal(DATA, block, s, wide=2) for s in seeds], wide),
        }
        if block == "resnet18":
            experts = [plan.method(DATA, network, "hard-moe", 1.0, s) for s in seeds]
            kinds["Hard MoE"] = (experts, HARD_MOE)
        if block == "resnet50-b":
            del kinds["dense"]  # the same network as above
        found += [
            Row(
                # Both wide ones are made of the same dense network.
                {"network": title.partition(" (")[0] if kind == "dense" else title, "method": kind},
                tuple(runs),
                _paper(error, DEEPMOE_MACS.get(block) if "DeepMoE" in kind else None),
                kind,
            )
            for kind, (runs, error) in kinds.items()
        ]
    paper = {"error": RESNET101, "macs": RESNET101_MACS}
    return [*found, Row({"network": "ResNet-101", "method": "dense"}, (), paper, "dense")]


def _paper(error: float | None, macs: float | None) -> dict[str, float]:
    """What the paper says of a row, as far as it does."""
    said = {"error": error, "macs": macs}
    return {key: value for key, value in said.items() if value is not None}


PAGE = Page(
    name="table-imagenet-wide",
    title="ResNet-18, -34, -50 (A and B) on ImageNet, widened, and Hard MoE",
    data=(DATA,),
    takes={
        "full": "weeks",
        "short": "about 2 min on 1,000 images of Imagenette",
        "smoke": "10 s",
    },
    shortened=(
        "{epochs} epochs in one cycle in place of the paper's 100, batches of 64; meant "
        "for a part of ImageNet such as Imagenette, whose errors can't be compared with ImageNet's"
    ),
    rows=rows,
    columns=(ERROR, MACS),
    plot=against_macs,
    notes=(
        "The paper says of costs that A's are 20 % below ResNet-101's, B's 18 %. Its MACs here are "
        "computed from that and 7.80 G for ResNet-101. Hard MoE costs what the dense network does.",
        MORE_TRAINING,
    ),
)
