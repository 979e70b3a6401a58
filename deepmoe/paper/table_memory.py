"""Memory of vgg16 on CIFAR-100 as it is kept: dense, masked, narrowed, with a codebook."""

from pathlib import Path
from typing import get_type_hints

from matplotlib.figure import Figure

from deepmoe.evaluation import collect_gates
from deepmoe.evaluation.memory import MemoryVariant, measure_memory
from deepmoe.evaluation.narrowing import used_channels
from deepmoe.paper.measured import opened
from deepmoe.paper.page import Column, Line, Made, Page, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.plots import bars

DATA, NETWORK = "cifar100", "vgg16"
SHARE = 0.685  # of the channels: half of the dense MACs


def rows(plan: Plan) -> list[Row]:
    """Every way to keep a network of each recipe."""
    seeds = plan.seeds(1)
    dense = tuple(plan.dense(DATA, NETWORK, s) for s in seeds)
    ours = tuple(plan.ours(DATA, NETWORK, SHARE, s) for s in seeds)
    literal = tuple(plan.literal(DATA, NETWORK, s) for s in seeds)
    codes = tuple(plan.codes(DATA, NETWORK, SHARE, s) for s in seeds)
    return [
        Row({"method": method, "kept as": part}, runs, part=part)
        for method, runs, part in (
            ("dense", dense, "dense"),
            ("DeepMoE, ours", ours, "masked"),
            ("DeepMoE, ours", ours, "narrowed"),
            ("DeepMoE, ours", codes, "codebook"),
            ("DeepMoE, literal", literal, "masked"),
            ("DeepMoE, literal", literal, "narrowed"),
        )
    ]


def measure(path: Path, plan: Plan) -> Line:
    """Parameters and bytes of every way to keep a checkpoint."""
    with opened(path, plan, DATA) as (loaded, source):
        model = loaded.model
        image, _ = next(iter(source.evaluation))
        used = None
        if model.gated:
            used = used_channels(collect_gates(model, source.evaluation, loaded.info.class_names))
        memory = measure_memory(model, image[:1].to(next(model.parameters()).device), used)
    return {variant["name"]: variant for variant in memory.as_dict()["variants"]}


def plot(made: Made) -> Figure:
    """Files and peaks side by side, in MiB."""
    keys = {"file_bytes": "file", "peak_bytes": "peak"}
    lines = [
        {**line, **{key: line[key] / 2**20 for key in keys if key in line}} for line in made.lines
    ]
    return bars(lines, keys, "MiB")


PAGE = Page(
    name="table-memory",
    title="memory of vgg16 on CIFAR-100: dense, masked, narrowed, with a codebook",
    data=(DATA,),
    takes={"full": "about 2 hours", "short": "about 2 min", "smoke": "3 s"},
    shortened="{epochs} epochs in one cycle in place of the paper's 350",
    rows=rows,
    columns=(
        Column("parameters", "parameters", "count"),
        Column("weight_bytes", "weights", "bytes"),
        Column("file_bytes", "file", "bytes"),
        Column("peak_bytes", "peak", "bytes"),
        Column("error", "error"),
    ),
    plot=plot,
    notes=(
        "The paper has no such figures. Masked is the gated network with all its channels, "
        "narrowed the same without those that no test image uses, and a codebook is a small "
        "network for each of its routes.",
    ),
    measure=measure,
    measures={str: get_type_hints(MemoryVariant)},
)
