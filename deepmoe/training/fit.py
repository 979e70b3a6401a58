"""The training loop: a joint stage, then a stage with embedding and gates frozen."""

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from deepmoe.config import RunConfig, TrainConfig, config_to_dict, config_to_toml
from deepmoe.costs import count_costs
from deepmoe.data import BatchLoader, ImageData, load_data
from deepmoe.data.loader import derive_seed
from deepmoe.errors import UserError
from deepmoe.losses import DeepMoELoss, LossParts
from deepmoe.model import DeepMoE
from deepmoe.registry import model_from_config
from deepmoe.training.checkpoint import load_checkpoint, save_checkpoint, write_atomically
from deepmoe.training.evaluate import EvalResult, evaluate
from deepmoe.training.log import RunLog
from deepmoe.training.schedules import Stage, learning_rate, stages

CHECKPOINT_NAME = "last.safetensors"
METRICS_NAME = "metrics.jsonl"


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
    checkpoint_path = out / CHECKPOINT_NAME
    if not resume:
        _claim_folder(out, overwrite)
    data = load_data(config.data)
    torch.manual_seed(config.train.seed)
    model = model_from_config(config, data.info.classes)
    count_costs(model, data.info.size)  # tells at once if the images are too small for the network
    fabric = _make_fabric(config.train)
    fabric.launch()
    model.to(fabric.device)
    optimizer = make_optimizer(model, config.train)
    done = 0
    if checkpoint_path.is_file():
        done = _restore(checkpoint_path, config, model, optimizer)
    write_atomically(out / "config.toml", config_to_toml(config).encode())

    train = BatchLoader(
        data.train,
        data.info,
        config.train.batch_size,
        augment=config.data,
        seed=config.train.seed,
        device=fabric.device,
    )
    evaluation = BatchLoader(data.evaluation, data.info, 500, device=fabric.device)
    log = RunLog(out / METRICS_NAME, finished=done, title=_title(config), quiet=quiet)
    total = config.train.epochs + config.train.finetune_epochs
    result = None
    for stage in stages(config.train):
        if done >= stage.end:
            continue
        set_stage(model, stage)
        wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
        for epoch in range(max(done, stage.start), stage.end):
            start = time.perf_counter()
            set_stage(model, stage)
            with log.batches(train.epoch(epoch), train.batches_per_epoch, f"epoch {epoch + 1}") as it:
                losses = _train_epoch(
                    fabric, wrapped, wrapped_optimizer, it, train.batches_per_epoch, config, stage, epoch
                )
            result = evaluate(model, evaluation, forward=wrapped)
            metrics = {
                "epoch": epoch + 1,
                "stage": stage.name,
                "lr": learning_rate(config.train, epoch),
                **losses,
                **_reported(result),
                "evaluated_on": data.evaluation_name,
                "seconds": round(time.perf_counter() - start, 3),
            }
            log.write(metrics, total)
            save_checkpoint(
                checkpoint_path, model, config, data.info, epoch=epoch + 1, optimizer=optimizer
            )
    if result is None:
        result = evaluate(model, evaluation)
    model.eval()
    return FitResult(model, result, data, checkpoint_path, out / METRICS_NAME)


def set_stage(model: DeepMoE, stage: Stage) -> None:
    """Training mode; in the frozen stage, embedding and heads neither learn nor track statistics."""
    model.train()
    for module in model.routing_modules():
        module.requires_grad_(not stage.frozen)
        module.train(not stage.frozen)


def make_optimizer(model: DeepMoE, train: TrainConfig) -> torch.optim.SGD:
    """SGD with momentum. Gate heads get no weight decay: the L1 term is their regulariser."""
    heads = list(model.heads.parameters()) if model.heads is not None else []
    gate_parameters = {id(p) for p in heads}
    others = [p for p in model.parameters() if id(p) not in gate_parameters]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": train.weight_decay}]
    if heads:
        groups.append({"params": heads, "weight_decay": 0.0})
    return torch.optim.SGD(groups, lr=train.lr, momentum=train.momentum, nesterov=train.nesterov)


def _train_epoch(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Any,
    batches: Any,
    batch_count: int,
    config: RunConfig,
    stage: Stage,
    epoch: int,
) -> dict[str, float]:
    """One pass over the training images; returns the mean of each part of the loss."""
    # Noise inside the model depends on seed and epoch alone, so that a resumed run repeats it.
    torch.manual_seed(derive_seed(config.train.seed, epoch, 1))
    loss_function = DeepMoELoss.from_config(config.loss, frozen=stage.frozen)
    sums: Tensor | None = None
    correct, images = torch.zeros((), device=fabric.device), 0
    for batch, (x_BCHW, labels) in enumerate(batches):
        now = epoch + batch / batch_count
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.train, now)
        output = model(x_BCHW)
        parts = loss_function(output, labels, now)
        optimizer.zero_grad(set_to_none=True)
        fabric.backward(parts.total)
        optimizer.step()
        values = torch.stack([part.detach() for part in parts])
        sums = values if sums is None else sums + values
        correct += (output.logits.detach().argmax(dim=1) == labels).sum()
        images += len(labels)
    assert sums is not None, "an epoch has at least one batch"
    means = dict(zip(LossParts._fields, (sums / batch_count).tolist(), strict=True))
    return {
        "loss": means["total"],
        "task_loss": means["task"],
        "gate_l1": means["gates"],
        "embedding_loss": means["embedding"],
        "train_accuracy": correct.item() / images,
    }


def _claim_folder(out: Path, overwrite: bool) -> None:
    files = [out / CHECKPOINT_NAME, out / METRICS_NAME]
    if any(file.exists() for file in files):
        if not overwrite:
            raise UserError(f"{out} holds a run already: resume it, overwrite it or choose another")
        for file in files:
            file.unlink(missing_ok=True)


def _make_fabric(train: TrainConfig) -> Fabric:
    device = train.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device is cuda, but this machine has no usable CUDA device")
    precision = train.precision
    if precision == "auto":
        precision = "bf16-mixed" if device == "cuda" else "32-true"
    return Fabric(accelerator=device, devices=1, precision=precision)


def _restore(
    path: Path, config: RunConfig, model: DeepMoE, optimizer: torch.optim.Optimizer
) -> int:
    checkpoint = load_checkpoint(path)
    if checkpoint.config != config:
        raise UserError(
            f"{path} is from a run with another configuration ({_difference(checkpoint.config, config)})"
        )
    model.load_state_dict(checkpoint.model.state_dict())
    for name, parameter in model.named_parameters():
        state = checkpoint.optimizer_state.get(name)
        if state is not None:
            optimizer.state[parameter].update(
                {key: value.to(parameter.device) for key, value in state.items()}
            )
    return checkpoint.epoch


def _difference(old: RunConfig, new: RunConfig) -> str:
    before, after = config_to_dict(old), config_to_dict(new)
    keys = [
        f"{table}.{key}"
        for table in before
        for key in {**before[table], **after[table]}
        if before[table].get(key) != after[table].get(key)
    ]
    return ", ".join(keys)


def _reported(result: EvalResult) -> dict[str, Any]:
    kept = asdict(result)
    return {
        "accuracy": kept["accuracy"],
        "evaluation_loss": kept["loss"],
        "embedding_accuracy": kept["embedding_accuracy"],
        "macs": kept["macs"],
        "macs_share": result.macs_share,
        "active": kept["active"],
    }


def _title(config: RunConfig) -> str:
    return f"{config.model.name} {'dense' if config.model.gates == 'none' else 'deepmoe'}"
