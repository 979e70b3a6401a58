"""A training run: a joint stage, then a stage with embedding and gates frozen; resumable."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from deepmoe.config import RunConfig, TrainConfig, config_to_dict, config_to_toml
from deepmoe.costs import count_costs
from deepmoe.data import BatchLoader, ImageData, load_data
from deepmoe.errors import UserError
from deepmoe.model import DeepMoE
from deepmoe.registry import model_from_config
from deepmoe.training.checkpoint import load_checkpoint, save_checkpoint, write_atomically
from deepmoe.training.epoch import make_optimizer, set_stage, train_epoch
from deepmoe.training.evaluate import EvalResult, evaluate
from deepmoe.training.log import RunLog
from deepmoe.training.schedules import learning_rate, stages

CHECKPOINT_NAME = "last.safetensors"
METRICS_NAME = "metrics.jsonl"
EVALUATION_BATCH = 500


@dataclass(frozen=True)
class FitResult:
    """A finished run."""

    model: DeepMoE
    evaluation: EvalResult
    data: ImageData
    checkpoint: Path
    metrics: Path


def fit(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> FitResult:
    """Trains a model as configured, and leaves checkpoint and metrics in a folder.

    Args:
        config: everything the run depends on.
        out: folder of the run.
        resume: go on from the folder's checkpoint; start anew where there is none yet.
        overwrite: replace a run that is in the folder already.
        quiet: print nothing.

    Raises:
        UserError: for a configuration or data that can't be used, or a folder in use.
    """
    out = Path(out)
    checkpoint_path, metrics_path = out / CHECKPOINT_NAME, out / METRICS_NAME
    if not resume:
        _claim([checkpoint_path, metrics_path], overwrite)
    fabric = _make_fabric(config.train)
    fabric.launch()
    data = load_data(config.data)
    train = BatchLoader(
        data.train,
        data.info,
        config.train.batch_size,
        augment=config.data,
        seed=config.train.seed,
        device=fabric.device,
    )
    evaluation = BatchLoader(data.evaluation, data.info, EVALUATION_BATCH, device=fabric.device)
    torch.manual_seed(config.train.seed)
    model = model_from_config(config, data.info.classes).to(fabric.device)
    count_costs(model, data.info.size)  # tells at once if the images are too small for the network
    optimizer = make_optimizer(model, config.train)
    done = _restore(checkpoint_path, config, model, optimizer) if checkpoint_path.exists() else 0

    write_atomically(out / "config.toml", config_to_toml(config).encode())
    log = RunLog(metrics_path, finished=done, title=_title(config), quiet=quiet)
    total = config.train.epochs + config.train.finetune_epochs
    result = None
    for stage in stages(config.train):
        if done >= stage.end:
            continue
        set_stage(model, stage)
        wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
        for epoch in range(max(done, stage.start), stage.end):
            start = time.perf_counter()
            count = train.batches_per_epoch
            with log.progress(train.epoch(epoch), count, f"epoch {epoch + 1}") as batches:
                losses = train_epoch(
                    fabric,
                    wrapped,
                    wrapped_optimizer,
                    batches,
                    batch_count=count,
                    config=config,
                    stage=stage,
                    epoch=epoch,
                )
            result = evaluate(model, evaluation, forward=wrapped)
            metrics = {
                "epoch": epoch + 1,
                "stage": stage.name,
                "lr": learning_rate(config.train, epoch),
                **losses,
                **_reported(result, data.evaluation_name),
                "seconds": round(time.perf_counter() - start, 3),
            }
            log.write(metrics, total)
            save_checkpoint(
                checkpoint_path, model, config, data.info, epoch=epoch + 1, optimizer=optimizer
            )
    result = result or evaluate(model, evaluation)
    return FitResult(model.eval(), result, data, checkpoint_path, metrics_path)


def _claim(files: list[Path], overwrite: bool) -> None:
    taken = [file for file in files if file.exists()]
    if taken and not overwrite:
        raise UserError(
            f"{taken[0].parent} holds a run already: resume it, overwrite it or choose another"
        )
    for file in taken:
        file.unlink()


def _make_fabric(train: TrainConfig) -> Fabric:
    device, precision = train.device, train.precision
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device is cuda, but this machine has no usable CUDA device")
    if precision == "auto":
        precision = "bf16-mixed" if device == "cuda" else "32-true"
    return Fabric(accelerator=device, devices=1, precision=precision)


def _restore(
    path: Path, config: RunConfig, model: DeepMoE, optimizer: torch.optim.Optimizer
) -> int:
    """Loads a checkpoint into model and optimiser; returns the epochs it has behind it."""
    checkpoint = load_checkpoint(path)
    changed = _changed_keys(checkpoint.config, config)
    if changed:
        raise UserError(f"{path} is from a run with other settings of {', '.join(changed)}")
    model.load_state_dict(checkpoint.model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in checkpoint.optimizer_state.get(name, {}).items():
            optimizer.state[parameter][key] = value.to(parameter.device)
    return checkpoint.epoch


def _changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    before, after = _flat(old), _flat(new)
    elsewhere = {"data.root", "train.device"}  # a run may move to another place
    keys = {**before, **after}
    return [k for k in keys if before.get(k) != after.get(k) and k not in elsewhere]


def _flat(config: RunConfig) -> dict[str, Any]:
    tables = config_to_dict(config)
    return {f"{t}.{key}": value for t, table in tables.items() for key, value in table.items()}


def _reported(result: EvalResult, evaluated_on: str) -> dict[str, Any]:
    values = result.as_dict()
    values["evaluation_loss"] = values.pop("loss")
    return {**values, "evaluated_on": evaluated_on}


def _title(config: RunConfig) -> str:
    return f"{config.model.name} {'dense' if config.model.gates == 'none' else 'deepmoe'}"
