"""Several devices: which process this is, and batch norm over all of them."""

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor, distributed, nn

from deepmoe.config import TrainConfig
from deepmoe.data import Shard
from deepmoe.errors import UserError

T = TypeVar("T")


def make_fabric(train: TrainConfig, *, devices: int = 1, nodes: int = 1) -> Fabric:
    """Fabric for the configured device and precision; DDP where there are several devices."""
    device, precision = train.device, train.precision
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device is cuda, but this machine has no usable CUDA device")
    if device == "cuda" and devices > torch.cuda.device_count():
        raise UserError(f"--devices is {devices}, but there are {torch.cuda.device_count()} GPUs")
    if devices < 1 or nodes < 1:
        raise UserError(f"--devices and --nodes must be at least 1, not {devices} and {nodes}")
    launched = int(os.environ.get("WORLD_SIZE", devices * nodes))
    if launched != devices * nodes:
        raise UserError(
            f"{launched} processes were launched, but --devices {devices} and --nodes {nodes} "
            f"ask for {devices * nodes}"
        )
    if precision == "auto":
        precision = "bf16-mixed" if device == "cuda" else "32-true"
    strategy = "ddp" if devices * nodes > 1 else "auto"
    # Fabric tells of its precision and of the GPU's units each time, in between our own lines.
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric = Fabric(
        accelerator=device,
        devices=devices,
        num_nodes=nodes,
        precision=precision,
        strategy=strategy,
    )
    fabric.launch()
    return fabric


def shard_of(fabric: Fabric) -> Shard:
    """Which part of every batch this process trains on."""
    return Shard(fabric.global_rank, fabric.world_size)


def any_process(fabric: Fabric, flag: bool) -> bool:
    """True in every process if it is true in one."""
    if fabric.world_size == 1:
        return flag
    total = fabric.all_reduce(torch.tensor(float(flag), device=fabric.device), reduce_op="sum")
    return bool(torch.as_tensor(total) > 0)


def sum_over_processes(fabric: Fabric, tensor: Tensor) -> Tensor:
    """The sum of every process's tensor, in every process; the tensor itself stays as it is."""
    if fabric.world_size == 1:
        return tensor.clone()
    return torch.as_tensor(fabric.all_reduce(tensor.clone(), reduce_op="sum"))


def copy_from_first(fabric: Fabric, tensor: Tensor) -> None:
    """Gives every process the first one's values, in place."""
    if fabric.world_size > 1:
        distributed.broadcast(tensor.data, src=0)


def made_by_first(fabric: Fabric, make: Callable[[], T]) -> T:
    """What the first process makes, a copy of it in every other; a UserError of it reaches all.

    What is made must lie on the CPU: copies would come to the first process's device.
    """
    made: Any = None
    if fabric.is_global_zero:
        try:
            made = make()
        except UserError as error:
            made = error
    made = fabric.broadcast(made)
    if isinstance(made, UserError):
        raise made
    return made


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
