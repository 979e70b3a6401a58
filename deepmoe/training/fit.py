"""A training run from configuration to checkpoint; resumable."""

import contextlib
import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import Dataset

from deepmoe.checkpoint import (
    TrainState,
    load_checkpoint,
    read_model,
    read_progress,
)
from deepmoe.compare.task import check_norms
from deepmoe.config import (
    GIVEN,
    ModelConfig,
    RunConfig,
    TrainConfig,
    config_to_dict,
    config_to_toml,
)
from deepmoe.configured_models import config_of
from deepmoe.costs import count_costs
from deepmoe.data import DataInfo, DataSource, open_data, open_datasets
from deepmoe.errors import UserError
from deepmoe.files import exclusive, write_atomically
from deepmoe.hard_moe import HardMoE
from deepmoe.layers import ScaleFactors
from deepmoe.model import DeepMoE
from deepmoe.processes import from_first_process
from deepmoe.progress import progress, showing
from deepmoe.sources import is_source
from deepmoe.training.checkpoint_store import CheckpointStore
from deepmoe.training.distributed import make_fabric, shard_of, synchronise_bn
from deepmoe.training.epoch_figures import Result
from deepmoe.training.experts import check_devices, learn_centroids
from deepmoe.training.lessons import TaughtLoader, only_lessons
from deepmoe.training.log import METRICS_NAME, RunLog, read_metrics
from deepmoe.training.model_and_optimizer import make_model, make_optimizer, prepared
from deepmoe.training.teachers import load_teachers
from deepmoe.training.trainer import Trainer
from deepmoe.training.warm_start import pruned_start, prunes, start_from

DEFAULT_OUT = "runs/fit"
PRUNING_NAME = "pruning.json"  # how long it took to remove channels, where a run does


@dataclass(frozen=True)
class FitResult:
    """A finished run."""

    model: DeepMoE
    evaluation: Result
    data: DataSource
    checkpoint: Path
    metrics: Path


@overload
def fit(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    devices: int = 1,
    nodes: int = 1,
    quiet: bool = False,
) -> FitResult: ...
@overload
def fit(
    model: DeepMoE,
    train_dataset: Dataset,
    validation_dataset: Dataset,
    config: RunConfig,
    out: str | Path = DEFAULT_OUT,
    *,
    info: DataInfo | None = None,
    resume: bool = False,
    overwrite: bool = False,
    devices: int = 1,
    nodes: int = 1,
    quiet: bool = False,
) -> FitResult: ...
def fit(*arguments: Any, **options: Any) -> FitResult:
    """Trains a model, and leaves checkpoints and metrics in a folder.

    `fit(config, out)` makes model and data as configured. `fit(model, train_dataset,
    validation_dataset, config, out)` trains a model of your own, in place, on any torch datasets of
    (normalised image, label); then `config` says how to train, and its tables `model`, `embedding`
    and `heads` are taken from the model.

    Args:
        config: everything the run depends on.
        out: folder of the run.
        model: gated, by `gate` or `create_model`.
        train_dataset: to learn from.
        validation_dataset: to evaluate on after each epoch.
        info: names of the classes, and how images were normalised, for `deepmoe predict`.
        resume: go on from the folder's last checkpoint; start anew where there is none yet.
        overwrite: replace a run that is in the folder already.
        devices: on each node.
        nodes: launched by torchrun or SLURM.
        quiet: print nothing.

    Raises:
        UserError: for a configuration or data that can't be used, a folder in use, a full disk,
            a loss that diverged, or a signal that asked the run to stop.
    """
    first = arguments[0] if arguments else options.get("model", options.get("config"))
    if isinstance(first, RunConfig | DeepMoE):
        run: Callable[..., FitResult]
        run = _fit_configured if isinstance(first, RunConfig) else _fit_given
        try:
            inspect.signature(run).bind(*arguments, **options)
        except TypeError as error:
            raise UserError(f"fit was called with wrong arguments: {error}") from error
        with showing(not options.get("quiet")):
            return run(*arguments, **options)
    if isinstance(first, nn.Module):
        raise UserError("fit trains gated models: give it deepmoe.gate(network, images)")
    raise UserError(f"fit takes a configuration or a model first, not {type(first).__name__}")


def _fit_configured(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    devices: int = 1,
    nodes: int = 1,
    quiet: bool = False,
) -> FitResult:
    check_devices(config, devices * nodes)
    fabric = make_fabric(config.train, devices=devices, nodes=nodes)
    check_folder(Path(out), resume=resume, overwrite=overwrite)
    config = as_pruned(config, CheckpointStore(Path(out), keep=0).last if resume else None)
    data = open_data(
        config.data,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        device=fabric.device,
        shard=shard_of(fabric),
        calibrate=_calibrates(config),
    )
    model = make_model(config, data.info, fabric.device)
    return _run(config, Path(out), fabric, data, model, resume, quiet)


def _fit_given(
    model: DeepMoE,
    train_dataset: Dataset,
    validation_dataset: Dataset,
    config: RunConfig,
    out: str | Path = DEFAULT_OUT,
    *,
    info: DataInfo | None = None,
    resume: bool = False,
    overwrite: bool = False,
    devices: int = 1,
    nodes: int = 1,
    quiet: bool = False,
) -> FitResult:
    if not isinstance(config, RunConfig):
        raise UserError(f"fit takes a RunConfig after the datasets, not a {type(config).__name__}")
    if prunes(config):
        raise UserError("a model of your own is pruned before fit: by deepmoe.pruning.prune")
    config = config_of(model, replace(config, data=replace(config.data, name=GIVEN)))
    check_devices(config, devices * nodes)
    fabric = make_fabric(config.train, devices=devices, nodes=nodes)
    check_folder(Path(out), resume=resume, overwrite=overwrite)
    data = open_datasets(
        train_dataset,
        validation_dataset,
        config.data,
        model.classes,
        colours=model.gating.graph.colours,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        device=fabric.device,
        shard=shard_of(fabric),
        info=info,
    )
    model = prepared(model, fabric.device)
    return _run(config, Path(out), fabric, data, model, resume, quiet)


def _run(
    config: RunConfig,
    out: Path,
    fabric: Fabric,
    data: DataSource,
    model: DeepMoE,
    resume: bool,
    quiet: bool,
) -> FitResult:
    """Trains a model on opened data, from where the folder's last checkpoint is."""
    train = config.train
    store = CheckpointStore(out, train.keep_checkpoints)
    count_costs(model, data.info.size)  # tells at once if the images are too small for the network
    if config.loss.norm_sparsity or isinstance(model.heads, ScaleFactors):
        check_norms(model.network, model.gating)
    resumed, prune_seconds = resume and store.last.exists(), None
    state, notes = TrainState(), []
    if train.start is not None and not resumed:
        start = start_from(train.start, model, data.info, config)
        if prunes(config):
            began = time.perf_counter()
            with progress(f"removing channels by {train.prune_by}"):
                model, config = pruned_start(model, start, config, data)
            prune_seconds = time.perf_counter() - began
    if isinstance(model, HardMoE) and not resumed and not model.has_centroids:
        with fabric.autocast():  # as in the steps to come
            notes.append(learn_centroids(model, data.train, train.seed))
    optimizer = make_optimizer(model, config)
    if resumed:
        state, begun = _restore(store.last, config, model, optimizer)
        if (begun.start, begun.teachers) != (train.start, train.teachers):
            notes.append(
                "goes on with another train.start or train.teacher than it was started with"
            )
    lessons = only_lessons(train.teachers)
    if lessons is not None:
        taught = TaughtLoader(lessons, data.train, data.info)
        data = replace(data, train=taught)  # type: ignore[arg-type]
    teachers = None if lessons is not None else load_teachers(model, data.info, config)
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
            if prune_seconds is not None:
                removal = {"by": train.prune_by, "seconds": prune_seconds}
                write_atomically(out / PRUNING_NAME, json.dumps(removal).encode())
            log = RunLog(
                out,
                finished=state.epoch,
                recovered=state.metrics,
                title=_title(config, model),
                quiet=quiet,
                tensorboard=train.tensorboard,
            )
            for note in notes:
                log.tell(note)
        result = trainer.run(log)
    return FitResult(model, result, data, store.last, out / METRICS_NAME)


def as_pruned(config: RunConfig, last: Path | None) -> RunConfig:
    """The configuration with the widths that pruning has found when the run was begun.

    Before that they are not known, whatever a configuration says that an earlier run has left.
    Experts are as wide as their start is.
    """
    begun = read_progress(last)[0] if last is not None and last.exists() else None
    model, embedding = config.model, config.embedding
    if config.train.prunes:
        model = replace(model, kept=None if begun is None else begun.model.kept)
    if embedding.prune is not None:
        embedding = replace(embedding, kept=None if begun is None else begun.embedding.kept)
    if model.experts is not None:
        made_of = _start_of_experts(config) if begun is None else begun.model
        model = replace(model, kept=made_of.kept if model.kept is None else model.kept)
    return replace(config, model=model, embedding=embedding)


def _start_of_experts(config: RunConfig) -> ModelConfig:
    start = config.train.start
    if start is None:
        raise UserError(
            "experts are copies of a trained network: with model.experts, name its checkpoint by "
            "train.start"
        )
    if not Path(start).is_file():
        raise UserError(f"train.start: no checkpoint at {start}; train that network first")
    return read_model(start)


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Keeps other runs out of the folder; all processes of this one are told if that fails."""
    with contextlib.ExitStack() as stack:
        from_first_process(lambda: stack.enter_context(exclusive(out)))
        yield


def _calibrates(config: RunConfig) -> bool:
    train = config.train
    # Channels that fbs keeps are counted: no images are needed for that.
    counted = config.heads.kind == "fbs"
    fitted = (train.target_macs is not None and not counted) or train.codes is not None
    return fitted and config.model.gates != "none"


def check_folder(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises a UserError where a run can't begin, or go on, in a folder."""
    store = CheckpointStore(out, keep=0)
    if out.exists() and not out.is_dir():
        raise UserError(f"cannot write to {out}: it is not a folder")
    used = store.any()
    if resume and used and not store.last.exists():
        raise UserError(f"{out} has checkpoints, but no {store.last.name} to resume from")
    if not resume and not overwrite and (used or read_metrics(out / METRICS_NAME)):
        raise UserError(
            f"{out} holds a run already: choose another folder, or pass --resume or --overwrite "
            "(in Python: resume=True or overwrite=True)"
        )


def _restore(
    path: Path, config: RunConfig, model: DeepMoE, optimizer: torch.optim.Optimizer
) -> tuple[TrainState, TrainConfig]:
    """Loads a checkpoint into model and optimiser; returns how far it is, and its settings."""
    begun, _ = read_progress(path)  # tells of settings that are gone
    changed = changed_keys(begun, config)
    if changed:
        raise UserError(f"{path} was trained with other settings of {', '.join(changed)}")
    name = config.model.name
    made = model.one_network if name == GIVEN else name if is_source(name) else None
    checkpoint = load_checkpoint(path, network=made)
    if checkpoint.model.codebook is not None:
        model.codebook = checkpoint.model.codebook.to(next(model.parameters()).device)
    for buffer in ("thresholds", "exit_at", "exit_vote"):
        value = getattr(checkpoint.model, buffer)
        if value is not None:
            setattr(model, buffer, value.to(next(model.parameters()).device))
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


def _title(config: RunConfig, model: DeepMoE) -> str:
    name = config.model.name if config.model.name != GIVEN else type(model.one_network).__name__
    if isinstance(model, HardMoE):
        return f"{name} with {len(model.centroids)} experts"
    own = not model.gated or config.heads.kind in ("relu", "noisy-topk")
    kind = "deepmoe" if own else config.heads.kind
    return f"{name} {kind if model.gated or model.embedding is not None else 'dense'}"
