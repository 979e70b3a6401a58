"""How long a training epoch takes: dense twin, joint stage, frozen stage; and where time goes."""

import contextlib
import itertools
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from deepmoe.bench.benchmark import Benchmark, Timed
from deepmoe.checkpoint import TrainState
from deepmoe.config import RunConfig
from deepmoe.data import DataSource, open_data
from deepmoe.progress import progress
from deepmoe.timing import timed
from deepmoe.training.checkpoint_store import CheckpointStore
from deepmoe.training.distributed import make_fabric
from deepmoe.training.model_and_optimizer import make_model, make_optimizer
from deepmoe.training.schedules import TrainingStage, stages
from deepmoe.training.step import GraphedStep
from deepmoe.training.teachers import load_teachers
from deepmoe.training.trainer import Trainer

PHASE_BATCHES = 30
PROFILED_BATCHES = 10
KERNEL_KINDS = {  # by what the names of kernels hold
    "optimizer": "FusedSgd|multi_tensor",
    "elementwise and sums": "^triton_|elementwise|reduce|batch_norm|softmax",
    "convolutions and products": "conv|xmma|gemm|cutlass|cudnn|nvjet|wgrad|dgrad|implicit",
}


def bench_train(config: RunConfig, rounds: int = 5) -> "TrainBenchmark":
    """Times training epochs, without evaluation and checkpoints, interleaved in one run.

    Args:
        config: of the gated network; its dense twin is derived from it.
        rounds: timed epochs of each kind, after one that compiles and warms up.

    Returns:
        Median and spread of seconds an epoch by kind, ratios to the dense twin, and milliseconds a
        batch by phase and, on a GPU, by kind of kernel; there also the memory that each needs.
        Phases are timed one by one, waiting for the device after each, so they add up to more than
        a batch takes.
    """
    train = replace(config.train, epochs=rounds + 1, finetune_epochs=rounds + 1)
    config = replace(config, train=train)
    fabric = make_fabric(train)
    data = open_data(config.data, batch_size=train.batch_size, device=fabric.device)
    joint, frozen = stages(train)
    kinds = {"dense": (config.dense, joint), "joint": (config, joint), "frozen": (config, frozen)}
    contenders: dict[str, _Contender] = {}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with progress("timing", len(kinds) * (rounds + 1), "epochs") as work:
            for number, (name, (own, stage)) in itertools.product(range(rounds + 1), kinds.items()):
                with peak_memory(fabric.device) as peak:
                    if name not in contenders:
                        contenders[name] = _Contender(own, fabric, data, stage, Path(folder))
                    seconds[name].append(contenders[name].epoch_seconds(number))
                if not number and peak:  # later ones find its memory in place
                    memory[name] = peak[0]
                work.advance()
        warm_up = {name: values.pop(0) for name, values in seconds.items()}
        phases = {name: c.phase_milliseconds() for name, c in contenders.items()}
        kernels = {name: c.kernel_milliseconds() for name, c in contenders.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    values = {
        "model": config.model.name,
        "data": config.data.name,
        "batch_size": train.batch_size,
        "batches_per_epoch": data.train.batches_per_epoch,
        "device": str(fabric.device),
        "precision": fabric._precision.precision,
        "rounds": rounds,
        "seconds_per_epoch": medians,
        "spread": {name: [min(v), max(v)] for name, v in seconds.items()},
        "ratio_to_dense": {name: medians[name] / medians["dense"] for name in ("joint", "frozen")},
        "first_epoch_seconds": warm_up,
        "milliseconds_per_batch": phases,
        "gpu_milliseconds_per_batch": kernels,
        "gpu_gib": memory,
    }
    return TrainBenchmark(values)


@dataclass(frozen=True)
class TrainBenchmark(Benchmark):
    """How long an epoch of training takes, gated and dense."""

    unit = "seconds an epoch"

    def timed(self) -> list[Timed]:
        """The dense twin, and both stages of the gated network."""
        meanings = {
            "dense": "the dense twin: the same network without gates",
            "joint": "network, embedding and gates learn together",
            "frozen": "embedding and gates are frozen, the network learns on",
        }
        seconds = self.values["seconds_per_epoch"]
        return [Timed(name, seconds[name], meaning) for name, meaning in meanings.items()]

    @property
    def sentence(self) -> str:
        """What gates cost in training."""
        dense, joint, frozen = (t.time for t in self.timed())
        return (
            f"an epoch takes {dense:.1f} s dense, {joint:.1f} s gated ({joint / dense:.2f} times "
            f"as long) and {frozen:.1f} s with frozen gates"
        )

    def setting(self) -> str:
        """Network, data, device; on a GPU, the memory of each kind."""
        v = self.values
        memory = ", ".join(f"{kind} {gib:.1f}" for kind, gib in v["gpu_gib"].items())
        return (
            f"{v['model']} on {v['data']}, {v['batches_per_epoch']} batches of {v['batch_size']}; "
            f"{v['device']}, {v['precision']}" + (f"; GPU memory, GiB: {memory}" if memory else "")
        )


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[float]]:
    """GiB of a GPU that what stands under it allocates at its peak; nothing without a GPU."""
    found: list[float] = []
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    found.append((torch.cuda.max_memory_allocated(device) - before) / 2**30)


class _Contender:
    """One kind of training, ready to run epochs."""

    def __init__(
        self,
        config: RunConfig,
        fabric: Fabric,
        data: DataSource,
        stage: TrainingStage,
        folder: Path,
    ) -> None:
        model = make_model(config, data.info, fabric.device)
        optimizer = make_optimizer(model, config)
        store = CheckpointStore(folder, keep=0)
        teachers = load_teachers(model, data.info, config)
        self.trainer = Trainer(
            config, fabric, model, optimizer, data, store, TrainState(), teachers
        )
        self.stage = stage
        self.step = self.trainer.prepare(stage)
        self.device = fabric.device

    def epoch_seconds(self, number: int) -> float:
        """Trains one epoch."""
        epoch = self.stage.start + number
        train = partial(self.trainer.train_epoch, self.step, self.stage, epoch)
        return timed(train, self.device)[1]

    def phase_milliseconds(self) -> dict[str, float]:
        """Median time of each phase of a batch, alone. A CUDA graph is one phase."""
        times: dict[str, list[float]] = {}
        step, batches = self.step, self.trainer.data.train.epoch(0)
        for _ in range(min(PHASE_BATCHES, self.trainer.data.train.batches_per_epoch)):
            x, labels = self._timed(times, "data", partial(next, batches))
            if isinstance(step, GraphedStep):
                self._timed(times, "step", partial(step.run, x, labels))
                continue
            loss, *_ = self._timed(times, "forward", partial(step.forward, x, labels))
            self._timed(times, "backward", partial(step.backward, loss))
            self._timed(times, "optimizer", step.optimizer.step)
        return {name: statistics.median(values) for name, values in times.items()}

    def kernel_milliseconds(self) -> dict[str, float]:
        """What the GPU does in a batch, by kind of kernel; empty without one."""
        if self.device.type != "cuda":
            return {}
        batches = self.trainer.data.train.epoch(0)
        x, labels = next(batches)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED_BATCHES):
                self.step.run(x, labels)
            torch.cuda.synchronize()
        totals = dict.fromkeys([*KERNEL_KINDS, "other"], 0.0)
        for event in profile.key_averages():
            kinds = (k for k, pattern in KERNEL_KINDS.items() if re.search(pattern, event.key))
            totals[next(kinds, "other")] += event.self_device_time_total
        return {kind: t / 1e3 / PROFILED_BATCHES for kind, t in totals.items()}

    def _timed(self, times: dict[str, list[float]], name: str, call: Callable[[], Any]) -> Any:
        result, seconds = timed(call, self.device)
        times.setdefault(name, []).append(1e3 * seconds)
        return result
