"""ResNet-50 on ImageNet, made cheaper: pruning methods and narrow DeepMoE."""

from pathlib import Path

from deepmoe.paper.measured import TOP_ERRORS, top_errors
from deepmoe.paper.page import MACS, MORE_TRAINING, Column, Line, Page, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.plots import against_macs

DATA, NETWORK = "imagenet", "resnet50"
# Method, its share of the dense MACs in the paper, and the paper's figures.
PRUNED = {
    "sss": ("SSS", 0.797, {"error": 26.8, "macs": 3.0e9, "reduction": 20.3}),
    "li": ("Li", 0.81, {"error": 27.0, "top5": 8.9, "macs": 3.0e9, "reduction": 19.0}),
    "he": ("He", 0.5, {"top5": 9.2, "macs": 1.9e9, "reduction": 50.0}),
    "thinet": ("ThiNet", 0.442, {"error": 29.0, "top5": 10.0, "macs": 1.7e9, "reduction": 55.8}),
}
NARROW = {"error": 26.2, "top5": 8.4, "macs": 1.6e9, "reduction": 56.8}
SHARE = 0.46  # of the channels: 43 % of the dense MACs
DENSE = 23.85


def rows(plan: Plan) -> list[Row]:
    """The dense network, what each method leaves of it, and narrow DeepMoE."""
    seeds = plan.seeds(1)
    dense = tuple(plan.dense(DATA, NETWORK, s) for s in seeds)
    found = [Row({"method": "dense"}, dense, {"error": DENSE})]
    for method, (title, share, paper) in PRUNED.items():
        runs = tuple(plan.method(DATA, NETWORK, method, share, s) for s in seeds)
        found.append(Row({"method": title}, runs, paper))
    ours = tuple(plan.ours(DATA, NETWORK, SHARE, s) for s in seeds)
    literal = tuple(plan.literal(DATA, NETWORK, s) for s in seeds)
    return [
        *found,
        Row({"method": "narrow DeepMoE, ours"}, ours, NARROW),
        Row({"method": "narrow DeepMoE, literal"}, literal, NARROW),
    ]


def measure(path: Path, plan: Plan) -> Line:
    """Top-5 error."""
    return top_errors(path, plan, DATA)


PAGE = Page(
    name="table-pruned-resnet50",
    title="ResNet-50 on ImageNet, pruned by other methods, and narrow DeepMoE",
    data=(DATA,),
    takes={
        "full": "two weeks",
        "short": "about 1 min on 1,000 images of Imagenette",
        "smoke": "5 s",
    },
    shortened=(
        "{epochs} epochs in one cycle for the start and again for each method, in place of 100 and "
        "each method's own schedule; meant for a part of ImageNet such as Imagenette"
    ),
    rows=rows,
    columns=(
        Column("error", "top-1 error", compared=True),
        Column("top5", "top-5 error", compared=True),
        MACS,
        Column("reduction", "MACs saved"),
    ),
    plot=against_macs,
    notes=(
        "The paper's figures of other methods are those that their authors published. Their MACs "
        "and savings imply 3.7 to 3.8 G for the dense ResNet-50, where we count 4.09 G.",
        MORE_TRAINING,
    ),
    measure=measure,
    measures=TOP_ERRORS,
)
