"""How long a call takes, with what it leaves to the device."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call returns, and the seconds until the device is done with it."""
    _wait_for(device)
    start = time.perf_counter()
    result = call()
    _wait_for(device)
    return result, time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
