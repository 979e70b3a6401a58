"""What a finished run of a comparison comes to: accuracy on the test set, costs, time."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from deepmoe.bench.latency import Latency, bench_latency
from deepmoe.checkpoint import (
    Checkpoint,
    load_checkpoint,
    read_network,
    save_checkpoint,
)
from deepmoe.comparison.asked import Row
from deepmoe.config import DataConfig
from deepmoe.costs import count_costs
from deepmoe.data import open_data
from deepmoe.devices import autocast, choose_device, choose_precision
from deepmoe.errors import UserError, reason
from deepmoe.evaluation import evaluate, set_exits
from deepmoe.files import read_regular, write_atomically
from deepmoe.schema import from_plain
from deepmoe.sources import is_source
from deepmoe.sweep.grid import run_name
from deepmoe.training.fit import PRUNING_NAME
from deepmoe.training.log import METRICS_NAME, read_metrics

EXITS_NAME = "exits.safetensors"
MEASURED_NAME = "measured.json"


@dataclass(frozen=True)
class Measured:
    """A finished run's figures.

    Attributes:
        accuracy: on the test set.
        macs: mean of the images.
        dense_macs: of the whole network.
        parameters: of all that is needed to answer.
        prune_seconds: what it took to choose and remove channels, training for it included.
        exited: share of the images that exits have answered, where there are some.
        evaluated_on: what the accuracy is of.
    """

    accuracy: float
    macs: float
    dense_macs: int
    parameters: int
    prune_seconds: float | None
    exited: float | None
    evaluated_on: str

    @property
    def macs_share(self) -> float:
        """Mean MACs over those of the dense network."""
        return self.macs / self.dense_macs


def measure_run(row: Row, checkpoint: Path, out: Path, data: DataConfig) -> Measured:
    """Measures what a run has left; once, as long as its checkpoint does not change.

    Args:
        row: of the comparison.
        checkpoint: the last of its run.
        out: folder of all runs; a checkpoint elsewhere is measured each time.
        data: where images are; held-out ones are used to fit exits, and the test set to measure.
    """
    kept = checkpoint.with_name(MEASURED_NAME)
    if kept.exists() and kept.stat().st_mtime_ns > checkpoint.stat().st_mtime_ns:
        return _read(kept)
    loaded = _loaded(checkpoint)
    if row.method.fits_exits:
        loaded = _with_exits(loaded, row.share, checkpoint.with_name(EXITS_NAME), data)
    device = choose_device(loaded.config.train.device)
    test = open_data(
        dataclasses.replace(data, holdout=0), batch_size=1, device=device, info=loaded.info
    )
    with autocast(device, choose_precision(loaded.config.train.precision, device)):
        result = evaluate(loaded.model.to(device), test.evaluation)
    costs = count_costs(loaded.model, loaded.info.size)
    measured = Measured(
        accuracy=result.accuracy,
        macs=result.macs,
        dense_macs=result.dense_macs,
        parameters=costs.params + costs.embedding_params + costs.gate_params,
        prune_seconds=_prune_seconds(row, loaded.config.train.seed, out),
        exited=result.exited,
        evaluated_on=test.evaluation_name,
    )
    if checkpoint.parent.parent.resolve() == out.resolve():
        write_atomically(kept, json.dumps(dataclasses.asdict(measured), indent=2).encode())
    return measured


def measure_latency(path: Path, dense: Path, data: DataConfig, images: int) -> Latency:
    """Times a checkpoint on a CPU, one test image at a time, beside that of the dense network."""
    small, whole = _loaded(path), _loaded(dense)
    test = open_data(dataclasses.replace(data, holdout=0), batch_size=1, info=small.info)
    x_BCHW, _ = next(iter(test.evaluation))
    return bench_latency(small.model, whole.model, x_BCHW[:images])


def _loaded(path: Path) -> Checkpoint:
    name = read_network(path)
    return load_checkpoint(path, network=name if is_source(name) else None)


def _with_exits(loaded: Checkpoint, share: float, path: Path, data: DataConfig) -> Checkpoint:
    """The model with exits for a cost, fitted on held-out training images, and kept as a file."""
    device = choose_device(loaded.config.train.device)
    held_out = open_data(data, batch_size=1, device=device, info=loaded.info)
    if held_out.evaluation_name != "holdout":
        raise UserError("exits are fitted on training images that were held out: set data.holdout")
    loaded.model.to(device)
    with autocast(device, choose_precision(loaded.config.train.precision, device)):
        set_exits(loaded.model, held_out.evaluation, macs=share)
    save_checkpoint(path, loaded.model, loaded.config, loaded.info, loaded.state)
    return loaded


def _prune_seconds(row: Row, seed: int, out: Path) -> float | None:
    """Runs that came before the last one, and what removing channels took it."""
    *before, last = row.steps
    trained = [read_metrics(out / run_name(s.name, seed) / METRICS_NAME) for s in before]
    seconds = sum(line.get("seconds", 0.0) for lines in trained for line in lines)
    found = out / run_name(last.name, seed) / PRUNING_NAME
    if not before and not found.exists():
        return None
    return seconds + (_read_seconds(found) if found.exists() else 0.0)


def _read_seconds(path: Path) -> float:
    try:
        return float(json.loads(read_regular(path))["seconds"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {reason(error)}") from error


def _read(path: Path) -> Measured:
    try:
        return from_plain(json.loads(read_regular(path)), Measured)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: remove it, and compare again") from error
