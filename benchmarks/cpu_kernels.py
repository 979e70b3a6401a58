"""What each CPU kernel of the sparse engine is worth: dynamic mode with all ways, and without some.

    python benchmarks/cpu_kernels.py

One image, two threads. The engine plans every variant by itself, with the ways that it is left;
then all variants of a network take turns, so that a busy machine slows all of them.
"""

import argparse
import collections
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from deepmoe.bench.subjects import untrained_subject
from deepmoe.model import DeepMoE
from deepmoe.results import write_result
from deepmoe.sparse import Plan, SparseModel, sparsify
from deepmoe.sparse.dynamic import _Call
from deepmoe.timing import timed

THREADS = 2
ROUNDS = 50
PLANNING_RUNS = 20  # four of each way, and some to spare
WARM_UP = 2  # rounds
OUT = Path(__file__).with_name("cpu_kernels.json")
VARIANTS = {  # collecting is always possible, and calls the library
    "all ways": ("collect", "direct", "stream"),
    "without stream": ("collect", "direct"),
    "without direct": ("collect", "stream"),
    "collect alone": ("collect",),
}


class Network(NamedTuple):
    """What is measured."""

    label: str
    name: str
    density: float
    options: dict[str, Any]


NETWORKS = (
    Network("vgg16, wide 2", "vgg16", 0.5, {"wide": 2.0}),
    Network("vgg16, wide 2", "vgg16", 0.25, {"wide": 2.0}),
    Network("resnet50, wide 2", "resnet50", 0.5, {"wide": 2.0, "block": "bottleneck-a"}),
    Network("resnet56, wide 2", "resnet56", 0.5, {"wide": 2.0}),
    Network("resnet18", "resnet18", 0.5, {}),
)


def measure(network: Network, rounds: int) -> dict[str, Any]:
    """Medians of every variant, in milliseconds for one image."""
    subject = untrained_subject(
        network.name,
        density=network.density,
        batch=1,
        codes=None,
        size=None,
        device="cpu",
        options=network.options,
    )
    plans = plans_of(subject.dynamic, subject.images)
    models = {
        name: sparsify(subject.dynamic, plan=Plan(layers=ways)) for name, ways in plans.items()
    }
    times = take_turns(models, subject.images, rounds)
    return {
        "network": network.label,
        "density": network.density,
        "median_ms": {name: 1e3 * statistics.median(found) for name, found in times.items()},
        "spread_ms": {name: [1e3 * min(found), 1e3 * max(found)] for name, found in times.items()},
        "layers": {name: collections.Counter(ways.values()) for name, ways in plans.items()},
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def plans_of(model: DeepMoE, images: Tensor) -> dict[str, dict[str, str]]:
    """How each variant runs every layer that has a choice."""
    plans = {name: planned(model, images, ways) for name, ways in VARIANTS.items()}
    # A layer with one way left is not planned. Collecting is the one that is always left.
    cases = plans["all ways"]
    return {name: {c: plan.get(c, "collect") for c in cases} for name, plan in plans.items()}


@torch.inference_mode()
def planned(model: DeepMoE, images: Tensor, allowed: Iterable[str]) -> dict[str, str]:
    """What the engine finds to be fastest among these ways."""
    every, sparse = _Call.ways, sparsify(model)
    gates, _ = model.route(images)
    assert gates is not None
    start = sparse.start(images)
    with mock.patch.object(_Call, "ways", lambda call: [w for w in every(call) if w in allowed]):
        for _ in range(PLANNING_RUNS):
            sparse.run_dynamic(start, gates)
    return sparse.dynamic.plan


def take_turns(
    models: dict[str, SparseModel], images: Tensor, rounds: int
) -> dict[str, list[float]]:
    """Seconds of every run; each round starts with another model."""
    expected = next(iter(models.values()))(images).logits
    times: dict[str, list[float]] = {name: [] for name in models}
    names = collections.deque(models)
    for number in range(WARM_UP + rounds):
        for name in names:
            output, seconds = timed(lambda name=name: models[name](images), images.device)
            torch.testing.assert_close(output.logits, expected, rtol=1e-3, atol=1e-3)
            if number >= WARM_UP:
                times[name].append(seconds)
        names.rotate(-1)
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    values = []
    for network in NETWORKS:
        values.append(measure(network, asked.rounds))
        print(values[-1], flush=True)
    command = f"python benchmarks/cpu_kernels.py --rounds {asked.rounds}"
    write_result(OUT, values, command=command, seed=0, device="cpu")
