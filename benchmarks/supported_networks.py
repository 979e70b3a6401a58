"""What works in networks of the zoo and of other packages, tried out: the README's matrix.

    python benchmarks/supported_networks.py

Random weights, every group of channels gated that can be. `deepmoe.check` tries counts, gates,
removal and the sparse engine; `deepmoe.description` tells what stays ungated, and why.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from other_networks import networks as other_networks
from torch import nn

from deepmoe import DeepMoE, check, create_model, gate
from deepmoe.checking import Rule
from deepmoe.description import description
from deepmoe.results import write_result

OUT = Path(__file__).with_name("supported_networks.json")
ZOO = ("vgg16", "resnet56", "resnet18_cifar", "resnet50", "drn_a_50")
SIZE, FIXED_SIZE = 64, {"hf MobileNetV2": 224}  # pixels; those whose code knows its size
TRIED = {  # columns, by how names of rules begin
    "counts": "MACs equal",
    "gates": "gates of one",
    "removal": "closed gates",
    "sparse engine": "the sparse engine",
}


def networks() -> dict[str, Callable[[torch.Tensor], DeepMoE]]:
    """Gated models, by the package and its own name."""

    def gated(make: Callable[[], nn.Module]) -> Callable[[torch.Tensor], DeepMoE]:
        return lambda images: gate(make().eval(), images, where="all")

    zoo = {f"deepmoe {n}": lambda _, n=n: create_model(n, gates="all") for n in ZOO}
    return zoo | {name: gated(make) for name, make in other_networks().items()}


def tried(model: DeepMoE, images: torch.Tensor) -> dict[str, Any]:
    """What passed, the share of the MACs under gates, and why groups stay ungated."""
    rules = check(model.eval(), images).rules
    told = description(model, images.shape[-1])
    reasons = Counter(group["why_not"] for group in told["groups"] if not group["gated"])
    return {
        **{column: _passed(rules, start) for column, start in TRIED.items()},
        "gated_share": told["gated_share"],
        "gated_groups": told["gated_groups"],
        "ungated": dict(reasons),
    }


def _passed(rules: tuple[Rule, ...], start: str) -> bool:
    of_column = [rule.passed for rule in rules if rule.name.startswith(start)]
    return bool(of_column) and all(of_column)


def main() -> None:
    """Tries, prints and saves."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # of what stays ungated
    values = []
    for name, make in networks().items():
        images = torch.randn(2, 3, *2 * (FIXED_SIZE.get(name, SIZE),))
        values.append({"network": name, **tried(make(images), images)})
        print(values[-1], flush=True)
    command = "python benchmarks/supported_networks.py"
    write_result(OUT, values, command=command, seed=0, device="cpu")


if __name__ == "__main__":
    main()
