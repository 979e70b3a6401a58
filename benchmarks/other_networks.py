"""What gating is worth in networks of timm, torchvision and Hugging Face: one image on a CPU.

    python benchmarks/other_networks.py

Random weights, 224 px, one thread; random routes of half of the channels. The network itself, in
both memory formats, and the engine with all channels and with half of them take turns, so that a
busy machine slows all of them.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepmoe import gate, sparsify
from deepmoe.costs import count_costs, count_macs
from deepmoe.graph import Gating
from deepmoe.model import DeepMoE
from deepmoe.random_routes import set_routes
from deepmoe.results import write_result
from deepmoe.sources import import_torchvision

SIZE = (224, 224)
DENSITY = 0.5
ROUNDS = 15
PLANNING_RUNS = 60
OUT = Path(__file__).with_name("other_networks.json")
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "ResNet": {},
    "RegNet": {"layer_type": "y"},
    "EfficientNet": {
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "image_size": 224,
        "hidden_dim": 1280,
    },
    "MobileNetV2": {},
    "ConvNext": {},
}
TIMM = (
    *("resnet50", "seresnet50", "regnety_008", "mobilenetv3_large_100", "convnext_tiny"),
    *("efficientnet_b0", "dla34"),
)
TORCHVISION = ("resnet50", "vgg16_bn", "densenet121", "googlenet", "mobilenet_v2")


def networks() -> dict[str, Callable[[], nn.Module]]:
    """What is measured, by the package and its own name."""
    import_torchvision()
    import timm
    import torchvision
    import transformers

    def hugging_face(kind: str) -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(num_labels=1000, **HUGGING_FACE[kind])
        return getattr(transformers, f"{kind}ForImageClassification")(config)

    def of_torchvision(name: str) -> nn.Module:
        options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        return torchvision.models.get_model(name, weights=None, **options)

    return {
        **{f"hf {kind}": lambda k=kind: hugging_face(k) for kind in HUGGING_FACE},
        **{f"timm {name}": lambda n=name: timm.create_model(n) for name in TIMM},
        **{f"torchvision {name}": lambda n=name: of_torchvision(n) for name in TORCHVISION},
    }


@torch.inference_mode()
def measure(network: nn.Module, rounds: int) -> dict[str, Any]:
    """Medians in milliseconds, and what a route costs."""
    torch.manual_seed(0)
    network.eval()
    x = torch.randn(1, 3, *SIZE)
    with torch.inference_mode(False):
        model = gate(network, x.clone()).eval()
        set_routes(model, SIZE, DENSITY)
        sparse = sparsify(model)
        whole = sparsify(DeepMoE(None, None, network, Gating(model.gating.graph, ())).eval())
    last = copy.deepcopy(network).to(memory_format=torch.channels_last)
    x_last = x.contiguous(memory_format=torch.channels_last)
    runs: dict[str, Callable[[], Any]] = {
        "dense": lambda: network(x),
        "dense_channels_last": lambda: last(x_last),
        "engine_dense": lambda: whole(x),
        "sparse": lambda: sparse(x),
    }
    for _ in range(PLANNING_RUNS):
        sparse(x)
    for _ in range(PLANNING_RUNS // 4):  # it has fewer ways to choose from
        whole(x)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    medians = {name: 1000 * statistics.median(of_run) for name, of_run in times.items()}
    gates = model(x).gates
    macs = int(count_macs(model, SIZE, gates)[0])
    return {
        "median_ms": medians,
        "macs_share": macs / count_costs(model, SIZE).macs,
        "times_as_fast": min(medians["dense"], medians["dense_channels_last"]) / medians["sparse"],
        "by_skipping": medians["engine_dense"] / medians["sparse"],
    }


def main(arguments: Iterable[str] | None = None) -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all networks if none is given")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of what stays ungated
    values = []
    for name, make in networks().items():
        if options.names and not any(part in name for part in options.names):
            continue
        values.append({"network": name, **measure(make(), options.rounds)})
        fast, skipping = (values[-1][key] for key in ("times_as_fast", "by_skipping"))
        print(f"{name}: {fast:.2f}, of which {skipping:.2f} by skipping", flush=True)
    command = "python benchmarks/other_networks.py"
    write_result(options.out, values, command=command, seed=0, device="cpu")


if __name__ == "__main__":
    main()
