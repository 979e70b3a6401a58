"""The model that a run begins with, and the optimizer of its parameters."""

from typing import Any

import torch

from deepmoe.config import RunConfig
from deepmoe.configured_models import model_from_config
from deepmoe.data import DataInfo
from deepmoe.hard_moe import HardMoE
from deepmoe.layers import ScaleFactors
from deepmoe.model import DeepMoE
from deepmoe.training.proximal import ProximalSGD


def make_model(config: RunConfig, info: DataInfo, device: torch.device) -> DeepMoE:
    """A new model by the run's seed, on its device."""
    torch.manual_seed(config.train.seed)
    return prepared(model_from_config(config, info.classes, size=info.size), device)


def prepared(model: DeepMoE, device: torch.device) -> DeepMoE:
    """A model on a device, in the memory format that is fast there."""
    model.to(device)
    if device.type == "cuda":
        # A trial of all algorithms pays where batches are of one size. An expert's are not.
        torch.backends.cudnn.benchmark = not isinstance(model, HardMoE)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def make_optimizer(model: DeepMoE, config: RunConfig) -> torch.optim.SGD:
    """SGD with momentum. Gate heads get no weight decay: the L1 term is their regulariser.

    Those that look at features get it: they are layers like others.
    """
    train = config.train
    heads = list(model.heads.parameters()) if model.heads is not None else []
    gate_parameters = {id(p) for p in heads}
    others = [p for p in model.parameters() if id(p) not in gate_parameters]
    decay = {"weight_decay": train.weight_decay, "lr_scale": 1.0}
    groups: list[dict[str, Any]] = [{"params": others, **decay}]
    if heads:
        weight_decay = train.weight_decay if model.on_the_way else 0.0
        scale = config.heads.lr_scale
        groups.append({"params": heads, "weight_decay": weight_decay, "lr_scale": scale})
    kind = torch.optim.SGD
    if isinstance(model.heads, ScaleFactors):
        kind = ProximalSGD
        groups[-1]["shrinkage"] = config.loss.sparsity
    return kind(
        groups,
        lr=train.lr,
        momentum=train.momentum,
        nesterov=train.nesterov,
        fused=others[0].is_cuda,  # one kernel instead of hundreds
    )
