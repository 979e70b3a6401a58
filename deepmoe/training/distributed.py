"""Several devices: which process this is, and batch norm over all of them."""

import logging
import os
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, distributed, nn

from deepmoe.config import TrainConfig
from deepmoe.data import Shard
from deepmoe.devices import choose_device, choose_precision
from deepmoe.errors import UserError


def make_fabric(train: TrainConfig, *, devices: int = 1, nodes: int = 1) -> Fabric:
    """Fabric for the configured device and precision; DDP where there are several devices."""
    device = choose_device(train.device)
    if device.type == "cuda" and devices > torch.cuda.device_count():
        raise UserError(f"--devices is {devices}, but there are {torch.cuda.device_count()} GPUs")
    if devices < 1 or nodes < 1:
        raise UserError(f"--devices and --nodes must be at least 1, not {devices} and {nodes}")
    launched = int(os.environ.get("WORLD_SIZE", devices * nodes))
    if launched != devices * nodes:
        raise UserError(
            f"{launched} processes were launched, but --devices {devices} and --nodes {nodes} "
            f"ask for {devices * nodes}"
        )
    strategy = "ddp" if devices * nodes > 1 else "auto"
    # Fabric tells of its precision and of the GPU's units each time, in between our own lines.
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric = Fabric(
        accelerator=device.type,
        devices=devices,
        num_nodes=nodes,
        precision=choose_precision(train.precision, device),  # type: ignore[arg-type]
        strategy=strategy,
    )
    fabric.launch()
    return fabric


def shard_of(fabric: Fabric) -> Shard:
    """Which part of every batch this process trains on."""
    return Shard(fabric.global_rank, fabric.world_size)


def synchronise_bn(model: nn.Module, fabric: Fabric) -> None:
    """Makes batch norm see the whole batch: several devices then train as one would."""
    if fabric.world_size == 1:
        return
    if fabric.device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # in place, but for the model itself
        return
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = _SyncBatchNorm2d  # same parameters and buffers, another forward


class _SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over all processes, for devices that PyTorch's own does not know."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x_BCHW)
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        count = x_BCHW.numel() / x_BCHW.shape[1] * distributed.get_world_size()
        dims = (0, 2, 3)
        mean = _SumOverProcesses.apply(x_BCHW.sum(dim=dims)) / count
        centred = x_BCHW - mean[:, None, None]
        variance = _SumOverProcesses.apply(centred.square().sum(dim=dims)) / count
        with torch.no_grad():
            momentum = self.momentum if self.momentum is not None else 0.1
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * count / (count - 1), momentum)
            self.num_batches_tracked += 1
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centred * scale[:, None, None] + self.bias[:, None, None]


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        distributed.all_reduce(gradient)
        return gradient
