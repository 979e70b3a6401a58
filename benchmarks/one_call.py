"""What it is worth to run all convolutions of a pruned network by one call: one image on a CPU.

    python benchmarks/one_call.py

vgg16 of 32 px at several shares of its MACs, and a narrow network in front of a wide one, with as
many exits as in the trained model. Weights are random: time does not depend on what they say. The
ways take turns, as in headline_latency.py.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from headline_latency import IMAGES, ROUNDS, SIZE, cascade, dense, in_turn, let_exit

from deepmoe import sparsify
from deepmoe.model import DeepMoE
from deepmoe.results import write_result
from deepmoe.sparse import Plan
from deepmoe.sparse.chain import LIBRARY, WAYS
from deepmoe.sparse.planner import in_words

OUT = Path(__file__).with_name("one_call.json")
SHARES = (0.03, 0.09, 0.3, 0.54, 1.0)  # of the dense MACs
FIRST, SECOND, EXITED = 0.09, 0.54, 0.59  # stages, and images that exit, of the trained model
THREADS = (1, 2)


def planned(model: DeepMoE, first: str, whole: str, threads: int) -> Callable:
    """The engine, told which way to run a narrow network in front, and the network itself."""
    ways = {"first": first, "whole": whole}
    cases = {in_words((name, 3, *SIZE, threads)): way for name, way in ways.items()}
    return sparsify(model, plan=Plan(cases))


def all_cases(rounds: int) -> list[dict[str, Any]]:
    """Networks alone, and the cascade beside its second stage."""
    images, found = torch.randn(IMAGES, 1, 3, *SIZE), []
    before = torch.get_num_threads()
    for threads in THREADS:
        torch.set_num_threads(threads)
        for share in SHARES:
            model = dense(share)
            calls = {way: planned(model, way, way, threads) for way in WAYS}
            figures = in_turn(calls, images, rounds)
            found.append({"threads": threads, "share": share, "ms": figures})
        model = cascade(FIRST, SECOND)
        let_exit(model, images, round(EXITED * IMAGES))
        calls = {way: planned(model, way, LIBRARY, threads) for way in WAYS}
        calls["second stage alone"] = planned(dense(SECOND), LIBRARY, LIBRARY, threads)
        stages = {"first": FIRST, "second": SECOND, "exited": round(EXITED * IMAGES) / IMAGES}
        figures = in_turn(calls, images, rounds)
        found.append({"threads": threads, **stages, "ms": figures})
    torch.set_num_threads(before)
    return found


def main(arguments: Iterable[str] | None = None) -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    values = all_cases(options.rounds)
    for case in values:
        print(case)
    command = "python benchmarks/one_call.py"
    write_result(options.out, values, command=command, seed=0, device="cpu")


if __name__ == "__main__":
    main()
