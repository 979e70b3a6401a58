"""What `--resume` gives on a device: the same run twice, and once stopped on its way and resumed.

python benchmarks/resume.py --device cuda --save benchmarks/resume_gpu.json
"""

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from deepmoe.config import RunConfig, load_config
from deepmoe.errors import TrainingInterrupted
from deepmoe.results import write_result
from deepmoe.training import fit
from deepmoe.training.trainer import Trainer

STOPS = ((1, 3), (5, 10), (13, 1), (18, 20))  # epoch and batch, of 20 epochs of 22 batches


def measure(config: RunConfig) -> dict[str, object]:
    """Trains the same run three times, the last one with stops."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder, name) for name in ("first", "second", "stopped")}
        results = {name: fit(config, runs[name], quiet=True) for name in ("first", "second")}
        for stop in STOPS:
            train_until(stop, config, runs["stopped"])
        results["stopped"] = fit(config, runs["stopped"], resume=True, quiet=True)
        weights = {name: load_file(run / "last.safetensors") for name, run in runs.items()}
    return {
        "stops": len(STOPS),
        "tensors": len(weights["first"]),
        "equal, resumed": equal(weights["first"], weights["stopped"]),
        "equal, run again": equal(weights["first"], weights["second"]),
        "accuracy": f"{results['first'].evaluation.accuracy:.2%}",
        "accuracy, resumed": f"{results['stopped'].evaluation.accuracy:.2%}",
        "accuracy, run again": f"{results['second'].evaluation.accuracy:.2%}",
    }


def train_until(stop: tuple[int, int], config: RunConfig, out: Path) -> None:
    """Trains, from where the last stop was, up to a batch of an epoch; then as after SIGTERM."""
    original = Trainer._after_batch

    def stopping(self: Trainer, epoch: int, done: int, *rest: object) -> None:
        if (epoch, done) == stop:
            self.closed = "stopped for the measurement"
        original(self, epoch, done, *rest)

    Trainer._after_batch = stopping  # type: ignore[method-assign, assignment]
    try:
        fit(config, out, resume=True, quiet=True)
    except TrainingInterrupted:
        return
    finally:
        Trainer._after_batch = original  # type: ignore[method-assign]
    raise AssertionError(f"nothing stopped the run at {stop}")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    """How many tensors, of weights and optimiser, are the same to the bit."""
    return sum(torch.equal(one[name], other[name]) for name in one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    values = {}
    for precision in ("bf16-mixed", "32-true"):
        settings = [f"train.device={options.device}", f"train.precision={precision}"]
        config = load_config("quickstart", [*settings, "train.compile=off"])
        values[precision] = measure(config)
    command = f"python benchmarks/resume.py --device {options.device}"
    write_result(options.save, values, command=command, seed=0, device=options.device)
    print(values)


if __name__ == "__main__":
    main()
