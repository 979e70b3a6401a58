"""What a finished run of a comparison comes to: accuracy on the test set, costs, time."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from deepmoe.bench.latency import Latency, bench_latency
from deepmoe.checkpoint import (
    Checkpoint,
    load_checkpoint,
    read_network,
    read_progress,
    save_checkpoint,
)
from deepmoe.config import DataConfig
from deepmoe.costs import count_costs
from deepmoe.data import open_data
from deepmoe.devices import autocast, choose_device, choose_precision
from deepmoe.errors import UserError, reason
from deepmoe.evaluation import evaluate, set_exits
from deepmoe.files import is_newer, read_regular, write_atomically
from deepmoe.schema import from_plain
from deepmoe.sources import is_source
from deepmoe.training.fit import PRUNING_NAME
from deepmoe.training.log import METRICS_NAME, read_metrics

EXITS_NAME = "exits.safetensors"
MEASURED_NAME, LATENCY_NAME = "measured.json", "latency.json"
MOST = 1e18  # of any figure that was measured
Kept = TypeVar("Kept", "Measured", Latency)


@dataclass(frozen=True)
class Finished:
    """A run that has ended, and what its row asks of it.

    Attributes:
        row: its name.
        checkpoint: the run's last.
        own: whether the run is the comparison's: figures are kept beside its checkpoint. Those of
            a start that was given are measured each time.
        exits_for: share of the dense MACs that exits are fitted for; `None` for no exits.
        before: folders of the runs that led to this one.
    """

    row: str
    checkpoint: Path
    own: bool
    exits_for: float | None = None
    before: tuple[Path, ...] = ()

    @property
    def model(self) -> Path:
        """The checkpoint of the row's model: that with exits, once they are fitted."""
        return self.checkpoint if self.exits_for is None else self.checkpoint.with_name(EXITS_NAME)


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


def measure_run(run: Finished, data: DataConfig) -> Measured:
    """Measures what a run has left; once, as long as its checkpoint does not change.

    Args:
        run: that has ended.
        data: where images are; held-out ones are used to fit exits, and the test set to measure.
    """
    kept = run.checkpoint.with_name(MEASURED_NAME)
    if is_measured(run):
        return _read(kept, Measured)
    loaded = _loaded(run.checkpoint)
    if run.exits_for is not None:
        loaded = _with_exits(loaded, run.exits_for, run.model, data)
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
        prune_seconds=_prune_seconds(run),
        exited=result.exited,
        evaluated_on=test.evaluation_name,
    )
    if run.own:
        _keep(kept, measured)
    return measured


def is_finished(path: Path) -> bool:
    """Whether a run has come to its end, by its last checkpoint."""
    if not path.exists():
        return False
    config, state = read_progress(path)
    return state.epoch == config.train.total_epochs


def is_measured(run: Finished) -> bool:
    """Whether figures of its last checkpoint lie beside it, and of the exits that it was given."""
    kept = run.checkpoint.with_name(MEASURED_NAME)
    return is_newer(kept, run.checkpoint) and is_newer(kept, run.model)


def measure_latency(run: Finished, dense: Path, data: DataConfig, images: int) -> Latency:
    """Times a run's model on a CPU, one test image at a time, beside the dense network.

    Once, as long as neither model changes, for so many images and threads.
    """
    kept = run.checkpoint.with_name(LATENCY_NAME)
    if is_newer(kept, run.model) and is_newer(kept, dense):
        latency = _read(kept, Latency)
        if (latency.images, latency.threads) == (images, torch.get_num_threads()):
            return latency
    small, whole = _loaded(run.model), _loaded(dense)
    test = open_data(dataclasses.replace(data, holdout=0), batch_size=1, info=small.info)
    x_BCHW, _ = next(iter(test.evaluation))
    latency = bench_latency(small.model, whole.model, x_BCHW[:images])
    if run.own:
        _keep(kept, latency)
    return latency


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


def _prune_seconds(run: Finished) -> float | None:
    """Runs that came before the last one, and what removing channels took it."""
    trained = [read_metrics(folder / METRICS_NAME) for folder in run.before]
    seconds = sum(line.get("seconds", 0.0) for lines in trained for line in lines)
    found = run.checkpoint.with_name(PRUNING_NAME)
    if not run.before and not found.exists():
        return None
    return seconds + (_read_seconds(found) if found.exists() else 0.0)


def _read_seconds(path: Path) -> float:
    try:
        return float(json.loads(read_regular(path))["seconds"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {reason(error)}") from error


def _keep(path: Path, figures: Kept) -> None:
    write_atomically(path, json.dumps(dataclasses.asdict(figures), indent=2).encode())


def _read(path: Path, kind: type[Kept]) -> Kept:
    try:
        figures = from_plain(json.loads(read_regular(path)), kind)
        for name, value in vars(figures).items():
            least = 1e-9 if name.startswith("dense_") else 0  # others are divided by these
            if isinstance(value, int | float) and not least <= value < MOST:  # nan is not, either
                raise ValueError(f"{name} can't be {value}")
        return figures
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: remove it, and compare again") from error
