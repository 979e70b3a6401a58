"""How long a training epoch takes: dense twin, joint stage, frozen stage; and where time goes."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from deepmoe.config import RunConfig
from deepmoe.data import DataSource, open_data
from deepmoe.training.checkpoint import CheckpointStore
from deepmoe.training.distributed import make_fabric
from deepmoe.training.schedules import Stage, stages
from deepmoe.training.state import TrainState
from deepmoe.training.trainer import Trainer, make_model, make_optimizer

PHASE_BATCHES = 30


def bench_train(config: RunConfig, rounds: int = 5) -> dict[str, Any]:
    """Times training epochs, without evaluation and checkpoints, interleaved in one run.

    Args:
        config: of the gated network; its dense twin is derived from it.
        rounds: timed epochs of each kind, after one that compiles and warms up.

    Returns:
        Median and spread of seconds an epoch by kind, ratios to the dense twin, and milliseconds a
        batch by phase. Phases are timed one by one, waiting for the device after each, so they add
        up to more than a batch takes.
    """
    train = replace(config.train, epochs=rounds + 1, finetune_epochs=rounds + 1)
    config = replace(config, train=train)
    fabric = make_fabric(train)
    data = open_data(config.data, batch_size=train.batch_size, device=fabric.device)
    joint, frozen = stages(train)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            "dense": _Contender(config.dense, fabric, data, joint, Path(folder)),
            "joint": _Contender(config, fabric, data, joint, Path(folder)),
            "frozen": _Contender(config, fabric, data, frozen, Path(folder)),
        }
        warm_up = {name: c.epoch_seconds(0) for name, c in contenders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(1, rounds + 1):
            for name, contender in contenders.items():
                seconds[name].append(contender.epoch_seconds(number))
        phases = {name: c.phase_milliseconds() for name, c in contenders.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
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
    }


class _Contender:
    """One kind of training, ready to run epochs."""

    def __init__(
        self, config: RunConfig, fabric: Fabric, data: DataSource, stage: Stage, folder: Path
    ) -> None:
        model = make_model(config, data.info.classes, fabric.device)
        optimizer = make_optimizer(model, config.train)
        store = CheckpointStore(folder, keep=0)
        self.trainer = Trainer(config, fabric, model, optimizer, data, store, None, TrainState())
        self.stage = stage
        self.wrapped, self.optimizer = self.trainer.prepare(stage)
        self.wait = torch.cuda.synchronize if fabric.device.type == "cuda" else _nothing

    def epoch_seconds(self, number: int) -> float:
        """Trains one epoch."""
        self.wait()
        start = time.perf_counter()
        epoch = self.stage.start + number
        self.trainer.train_epoch(self.wrapped, self.optimizer, self.stage, epoch)
        self.wait()
        return time.perf_counter() - start

    def phase_milliseconds(self) -> dict[str, float]:
        """Median time of each phase of a batch, alone."""
        times: dict[str, list[float]] = {}
        loader = self.trainer.data.train
        batches = loader.epoch(0)
        weights = [torch.zeros((), device=self.trainer.fabric.device)] * 2
        for _ in range(min(PHASE_BATCHES, loader.batches_per_epoch)):
            torch.compiler.cudagraph_mark_step_begin()
            x, labels = self._timed(times, "data", partial(next, batches))
            step = partial(self.wrapped, x, labels, *weights)
            loss, _, _ = self._timed(times, "forward", step)
            self.optimizer.zero_grad(set_to_none=True)
            self._timed(times, "backward", partial(self.trainer.fabric.backward, loss))
            self._timed(times, "optimizer", self.optimizer.step)
        return {name: statistics.median(values) for name, values in times.items()}

    def _timed(self, times: dict[str, list[float]], name: str, call: Callable[[], Any]) -> Any:
        self.wait()
        start = time.perf_counter()
        result = call()
        self.wait()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return result


def _nothing() -> None:
    pass
