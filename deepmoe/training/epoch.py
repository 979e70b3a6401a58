"""One training epoch, and what distinguishes the stages."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from deepmoe.config import RunConfig, TrainConfig
from deepmoe.data.loader import derive_seed
from deepmoe.losses import DeepMoELoss, LossParts
from deepmoe.model import DeepMoE
from deepmoe.training.schedules import Stage, learning_rate


def set_stage(model: DeepMoE, stage: Stage) -> None:
    """Training mode; when frozen, embedding and heads neither learn nor track statistics."""
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


def train_epoch(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    batch_count: int,
    config: RunConfig,
    stage: Stage,
    epoch: int,
) -> dict[str, float]:
    """One pass over the training images.

    Args:
        fabric: runs the backward pass.
        model: as wrapped by Fabric, in the stage's mode.
        optimizer: as wrapped by Fabric.
        batches: the epoch's (images, labels).
        batch_count: how many there are.
        config: schedules and weights of the objective.
        stage: the stage that the epoch belongs to.
        epoch: its number, from 0, over both stages.

    Returns:
        The mean of each part of the loss, and the accuracy on the augmented images.
    """
    # Noise inside the model depends on seed and epoch alone, so that a resumed run repeats it.
    torch.manual_seed(derive_seed(config.train.seed, epoch, 1))
    objective = DeepMoELoss.from_config(config.loss, frozen=stage.frozen)
    sums = torch.zeros(len(LossParts._fields), device=fabric.device)
    correct, images = torch.zeros((), device=fabric.device), 0
    for batch, (x_BCHW, labels) in enumerate(batches):
        now = epoch + batch / batch_count
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.train, now)
        output = model(x_BCHW)
        parts = objective(output, labels, now)
        optimizer.zero_grad(set_to_none=True)
        fabric.backward(parts.total)
        optimizer.step()
        # Summed on the device: reading a value here would wait for it in every step.
        sums += torch.stack([part.detach() for part in parts])
        correct += (output.logits.detach().argmax(dim=1) == labels).sum()
        images += len(labels)
    means = dict(zip(LossParts._fields, (sums / batch_count).tolist(), strict=True))
    return {
        "loss": means["total"],
        "task_loss": means["task"],
        "gate_l1": means["gates"],
        "embedding_loss": means["embedding"],
        "train_accuracy": correct.item() / images,
    }
