"""Tensors of channels' numbers: of the shape of values, without a number for each place of them."""

from typing import Any

import torch
from torch import Tensor

NOTHING = 0  # the number of values that no layer has made


def nothing_like(value: Any) -> Any:
    """Numbers of a value that no layer has made; `None` where it is no tensor."""
    if isinstance(value, Tensor):
        return torch.full((1,) * value.dim(), NOTHING).expand(value.shape)
    if isinstance(value, tuple | list) and has_tensor(value):
        return type(value)(nothing_like(v) for v in value)
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, tuple | list) else []


def has_tensor(value: Any) -> bool:
    """Whether there is any."""
    return bool(tensors_in(value))


def expanded(numbers: Tensor, dim: int, value: Tensor) -> Tensor:
    """The numbers of channels, which lie along a dimension, for each place of a value."""
    shape = [1] * value.dim()
    shape[dim] = len(numbers)
    return numbers.view(shape).expand(value.shape)


def compact(labels: Tensor) -> Tensor:
    """One position only where all of a dimension are the same by construction."""
    for dim, stride in enumerate(labels.stride()):
        if stride == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def shrunk(labels: Tensor) -> Tensor:
    """The same numbers, expanded from one position where all of a dimension are alike."""
    shape, labels = labels.shape, compact(labels)
    for dim in range(labels.dim()):
        if labels.shape[dim] > 1 and bool((labels == labels.narrow(dim, 0, 1)).all()):
            labels = labels.narrow(dim, 0, 1)
    return labels.expand(shape)


def distinct_pairs(left: Tensor, right: Tensor) -> Tensor:
    """Which numbers meet, each pair once, in order."""
    many = int(right.max()) + 1
    both = (left.flatten() * many + right.flatten()).unique()
    return torch.stack([both // many, both % many], dim=1)
