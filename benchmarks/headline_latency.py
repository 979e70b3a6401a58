"""How long one image takes in networks of the README's table: one CPU core, random weights.

    python benchmarks/headline_latency.py

Time does not depend on what weights say, but on how many there are: so these are networks of the
same kind and cost, evenly narrowed, and random routes over as many channels as run in the trained
model. All run by the sparse engine, with batch norms folded, and take turns in blocks.
A block counts by its fastest run, which other work on the machine has disturbed least.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepmoe import create_model, sparsify
from deepmoe.costs import count_macs
from deepmoe.random_routes import set_routes
from deepmoe.results import write_result
from deepmoe.timing import timed

OUT = Path(__file__).with_name("headline_latency.json")
SIZE = (32, 32)
WARM_UP, ROUNDS, BLOCK = 60, 40, 10
OPEN = 0.72  # of the channels of a gated layer, as in the recipe
NARROW = {"pruned to 54 %": 0.54, "pruned to 12 %": 0.12}  # shares of the dense MACs


def narrowed(share: float) -> float:
    """The width at which vgg16 costs this share of its MACs."""

    def macs(wide: float) -> int:
        return count_macs(create_model("vgg16", classes=100, gates=None, wide=wide).gating, SIZE)

    dense, low, high = macs(1.0), 0.1, 1.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if macs(middle) > share * dense else (middle, high)
    return low


def networks() -> dict[str, torch.nn.Module]:
    """What is timed, by the names of the table's rows."""
    made = {"dense": create_model("vgg16", classes=100, gates=None)}
    made["gated"] = create_model("vgg16", classes=100).eval()
    set_routes(made["gated"], SIZE, OPEN)
    for name, share in NARROW.items():
        made[name] = create_model("vgg16", classes=100, gates=None, wide=narrowed(share))
    return {name: model.eval() for name, model in made.items()}


@torch.inference_mode()
def measure(models: dict[str, torch.nn.Module], rounds: int = ROUNDS) -> dict[str, Any]:
    """Milliseconds of one image, the median over blocks, and its MACs."""
    x, values = torch.randn(1, 3, *SIZE), {}
    with torch.inference_mode(False):
        sparse: dict[str, Callable] = {name: sparsify(model) for name, model in models.items()}
    for _ in range(WARM_UP):
        for call in sparse.values():
            call(x)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, call in sparse.items():
            block = [timed(partial(call, x), x.device)[1] for _ in range(BLOCK)]
            seconds[name].append(min(block))
    for name, model in models.items():
        gates = model(x).gates
        macs = int(count_macs(model, SIZE, gates)[0]) if gates else count_macs(model, SIZE)
        values[name] = {"ms": 1e3 * statistics.median(seconds[name]), "macs": macs}
    return values


def main(arguments: Iterable[str] | None = None) -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = measure(networks(), options.rounds)
    print(values)
    command = "python benchmarks/headline_latency.py"
    write_result(options.out, values, command=command, seed=0, device="cpu")


if __name__ == "__main__":
    main()
