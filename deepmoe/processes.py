"""Several processes that train or evaluate together, or one alone: sums, means, agreement."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from deepmoe.errors import UserError

T = TypeVar("T")


def process_count() -> int:
    """How many processes there are."""
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if there else 1


def is_first_process() -> bool:
    """Whether this one writes files and talks."""
    return process_count() == 1 or distributed.get_rank() == 0


def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of every process's tensor, in every process; the tensor itself stays as it is."""
    total = tensor.clone()
    if process_count() > 1:
        distributed.all_reduce(total)
    return total


def any_process(flag: bool, device: torch.device) -> bool:
    """True in every process if it is true in one."""
    if process_count() == 1:
        return flag
    return bool(sum_over_processes(torch.tensor(float(flag), device=device)) > 0)


def copy_from_first_process(tensor: Tensor) -> None:
    """Gives every process the first one's values, in place."""
    if process_count() > 1:
        distributed.broadcast(tensor.data, src=0)


def from_first_process(make: Callable[[], T]) -> T:
    """What the first process makes, a copy of it in every other; a UserError of it reaches all.

    What is made must lie on the CPU: copies would come to the first process's device.
    """
    made: list[Any] = [None]
    if is_first_process():
        try:
            made = [make()]
        except UserError as error:
            made = [error]
    if process_count() > 1:
        distributed.broadcast_object_list(made, src=0)
    if isinstance(made[0], UserError):
        raise made[0]
    return made[0]
