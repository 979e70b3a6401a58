"""How long one image takes in networks of the README's table: one CPU core, random weights.

    python benchmarks/headline_latency.py

Time does not depend on what weights say, but on how many there are: so these are networks of the
same kind and cost, evenly narrowed, random routes over as many channels as run in the trained
model, and a threshold at which as many images exit. All run by the sparse engine, with batch norms
folded, and take turns. An image counts by the fastest of a few runs, which other work on the
machine has disturbed least, and a network by the mean over images.
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
from deepmoe.model import DeepMoE, confidence
from deepmoe.network_embedding import NetworkEmbedding
from deepmoe.random_routes import set_routes
from deepmoe.results import write_result
from deepmoe.timing import timed

OUT = Path(__file__).with_name("headline_latency.json")
SIZE = (32, 32)
WARM_UP, ROUNDS, BLOCK = 60, 20, 5
OPEN = 0.72  # of the channels of a gated layer, as in the recipe
NARROW, NARROWER = 0.54, 0.16  # shares of the dense MACs
IMAGES, EXITING = 15, 10  # 67 % of the images exit, 66 % in the trained model


def narrowed(share: float) -> float:
    """The width at which vgg16 costs this share of its MACs."""

    def macs(wide: float) -> int:
        return count_macs(create_model("vgg16", classes=100, gates=None, wide=wide).gating, SIZE)

    dense, low, high = macs(1.0), 0.1, 1.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if macs(middle) > share * dense else (middle, high)
    return low


def networks() -> dict[str, DeepMoE]:
    """What is timed, by the names of the table's rows."""
    made = {"dense": dense(1.0)}
    made["gated"] = create_model("vgg16", classes=100).eval()
    set_routes(made["gated"], SIZE, OPEN)
    made["pruned to 54 %"] = dense(NARROW)
    made["exits"] = cascade(NARROWER, NARROW)
    return made


def dense(share: float) -> DeepMoE:
    """vgg16 without gates, at a share of its MACs."""
    wide = 1.0 if share == 1 else narrowed(share)
    return create_model("vgg16", classes=100, gates=None, wide=wide).eval()


def cascade(first: float, second: float) -> DeepMoE:
    """A narrow network first, then a wide one, at shares of the dense MACs."""
    narrow, wide = dense(first), dense(second)
    looks_first = NetworkEmbedding(narrow.network, narrow.gating.graph)
    exit_at = torch.tensor(1.0)
    return DeepMoE(looks_first, None, wide.network, wide.gating, exit_at=exit_at).eval()


@torch.inference_mode()
def let_exit(model: DeepMoE, images: torch.Tensor, count: int) -> None:
    """Sets the threshold at which so many images exit."""
    assert model.exit_at is not None
    sure = [confidence(model(x).embedding_logits).item() for x in images]
    model.exit_at.fill_(sorted(sure)[-count])


def measure(models: dict[str, DeepMoE], rounds: int = ROUNDS) -> dict[str, Any]:
    """Milliseconds of an image, and its MACs; means over images."""
    images = torch.randn(IMAGES, 1, 3, *SIZE)
    for model in models.values():
        if model.exit_at is not None:
            let_exit(model, images, EXITING)
    times = in_turn({name: sparsify(model) for name, model in models.items()}, images, rounds)
    return {
        name: {
            "ms": times[name],
            "macs": statistics.fmean(_macs(model, x) for x in images),
            "exited": EXITING / IMAGES if model.exit_at is not None else 0.0,
        }
        for name, model in models.items()
    }


@torch.inference_mode()
def in_turn(calls: dict[str, Callable], images: torch.Tensor, rounds: int) -> dict[str, float]:
    """Milliseconds of an image, the median over rounds of means over images."""
    for number in range(WARM_UP):
        for call in calls.values():
            call(images[number % IMAGES])
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(statistics.fmean(fastest(partial(call, x)) for x in images))
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few calls."""
    return min(timed(call, torch.device("cpu"))[1] for _ in range(BLOCK))


@torch.inference_mode()
def _macs(model: DeepMoE, x_BCHW: torch.Tensor) -> float:
    output = model(x_BCHW)
    if output.gates is None and output.exited is None:
        return count_macs(model, SIZE)
    return float(count_macs(model, SIZE, output.gates, output.exited)[0])


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
