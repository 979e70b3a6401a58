"""A training run from configuration to checkpoint; resumable."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepmoe.checkpoint import CheckpointStore, TrainState, load_checkpoint, read_progress
from deepmoe.config import RunConfig, TrainConfig, config_to_dict, config_to_toml
from deepmoe.costs import count_costs
from deepmoe.data import DataSource, open_data
from deepmoe.errors import UserError
from deepmoe.files import exclusive, write_atomically
from deepmoe.model import DeepMoE
from deepmoe.processes import from_first_process
from deepmoe.training.distributed import make_fabric, shard_of, synchronise_bn
from deepmoe.training.log import METRICS_NAME, RunLog, read_metrics
from deepmoe.training.teachers import load_teachers
from deepmoe.training.trainer import Result, Trainer, make_model, make_optimizer
from deepmoe.training.warm_start import start_from


@dataclass(frozen=True)
class FitResult:
    """A finished run."""

    model: DeepMoE
    evaluation: Result
    data: DataSource
    checkpoint: Path
    metrics: Path


def fit(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    devices: int = 1,
    nodes: int = 1,
    quiet: bool = False,
) -> FitResult:
    """Trains a model as configured, and leaves checkpoints and metrics in a folder.

    Args:
        config: everything the run depends on.
        out: folder of the run.
        resume: go on from the folder's last checkpoint; start anew where there is none yet.
        overwrite: replace a run that is in the folder already.
        devices: on each node.
        nodes: launched by torchrun or SLURM.
        quiet: print nothing.

    Raises:
        UserError: for a configuration or data that can't be used, a folder in use, a full disk,
            a loss that diverged, or a signal that asked the run to stop.
    """
    out = Path(out)
    store = CheckpointStore(out, config.train.keep_checkpoints)
    fabric = make_fabric(config.train, devices=devices, nodes=nodes)
    train = config.train
    check_folder(out, resume=resume, overwrite=overwrite)
    data = open_data(
        config.data,
        batch_size=train.batch_size,
        seed=train.seed,
        device=fabric.device,
        shard=shard_of(fabric),
        calibrate=_calibrates(config),
    )
    model = make_model(config, data.info.classes, fabric.device)
    count_costs(model, data.info.size)  # tells at once if the images are too small for the network
    optimizer = make_optimizer(model, config)
    state, notes = TrainState(), []
    if resume and store.last.exists():
        state, begun = _restore(store.last, config, model, optimizer)
        if (begun.start, begun.teachers) != (train.start, train.teachers):
            notes.append("goes on with another train.start or train.teacher than it was begun with")
    elif train.start is not None:
        start_from(train.start, model, data.info, config)
    teachers = load_teachers(model, data.info, config)
    if train.sync_bn:
        synchronise_bn(model, fabric)
    trainer = Trainer(config, fabric, model, optimizer, data, store, state, teachers)
    log = None
    fabric.barrier()  # every process has looked before one changes anything
    with _alone_in(out):
        if fabric.is_global_zero:
            if not resume:
                store.clear()
                (out / METRICS_NAME).unlink(missing_ok=True)
            elif state.epoch and not state.batch:
                store.keep_epoch(state)  # the run may have been killed before it came to that
            write_atomically(out / "config.toml", config_to_toml(config).encode())
            log = RunLog(
                out,
                finished=state.epoch,
                recovered=state.metrics,
                title=_title(config),
                quiet=quiet,
                tensorboard=train.tensorboard,
            )
            for note in notes:
                log.tell(note)
        result = trainer.run(log)
    return FitResult(model, result, data, store.last, out / METRICS_NAME)


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Keeps other runs out of the folder; all processes of this one are told if that fails."""
    with contextlib.ExitStack() as stack:
        from_first_process(lambda: stack.enter_context(exclusive(out)))
        yield


def _calibrates(config: RunConfig) -> bool:
    train = config.train
    fitted = train.target_macs is not None or train.codes is not None
    return fitted and config.model.gates != "none"


def check_folder(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises a UserError where a run can't begin, or go on, in a folder."""
    store = CheckpointStore(out, keep=0)
    if out.exists() and not out.is_dir():
        raise UserError(f"cannot write to {out}: it is not a folder")
    used = store.last.exists() or store.best.exists() or bool(store.epochs())
    if resume and used and not store.last.exists():
        raise UserError(f"{out} has checkpoints, but no {store.last.name} to resume from")
    if not resume and not overwrite and (used or read_metrics(out / METRICS_NAME)):
        raise UserError(f"{out} holds a run already: pass --resume, --overwrite or another --out")


def _restore(
    path: Path, config: RunConfig, model: DeepMoE, optimizer: torch.optim.Optimizer
) -> tuple[TrainState, TrainConfig]:
    """Loads a checkpoint into model and optimiser; returns how far it is, and its settings."""
    begun, _ = read_progress(path)  # tells of settings that are gone
    changed = changed_keys(begun, config)
    if changed:
        raise UserError(f"{path} was trained with other settings of {', '.join(changed)}")
    checkpoint = load_checkpoint(path)
    if checkpoint.model.codebook is not None:
        model.codebook = checkpoint.model.codebook.to(next(model.parameters()).device)
    if checkpoint.model.thresholds is not None:
        model.thresholds = checkpoint.model.thresholds.to(next(model.parameters()).device)
    model.to(next(checkpoint.model.parameters()).dtype)
    model.load_state_dict(checkpoint.model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in checkpoint.optimizer_state.get(name, {}).items():
            # In the parameter's memory format, as the optimiser itself would have made it.
            optimizer.state[parameter][key] = torch.empty_like(parameter).copy_(value)
    return checkpoint.state, checkpoint.config.train


# What may differ between the parts of one run: where and how it runs, not what it computes.
_FREE_KEYS = {
    "data.root",
    "data.workers",
    "data.unreadable_limit",
    "train.start",
    "train.teacher",
    "train.device",
    "train.compile",
    "train.cuda_graphs",
    "train.evaluate_epochs",
    "train.checkpoint_epochs",
    "train.checkpoint_minutes",
    "train.keep_checkpoints",
    "train.tensorboard",
    "train.loss_limit",
}


def changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that differ, and would make another run of it."""
    before, after = _flat(old), _flat(new)
    keys = {**before, **after}
    return [k for k in keys if before.get(k) != after.get(k) and k not in _FREE_KEYS]


def _flat(config: RunConfig) -> dict[str, Any]:
    tables = {name: t for name, t in config_to_dict(config).items() if isinstance(t, dict)}
    return {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }


def _title(config: RunConfig) -> str:
    return f"{config.model.name} {'dense' if config.model.gates == 'none' else 'deepmoe'}"
