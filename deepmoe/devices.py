"""Which device and precision to use, from what a configuration asks for."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepmoe.errors import UserError


def choose_device(asked: str | None = "auto") -> torch.device:
    """The device; `auto` is a GPU where there is one.

    Raises:
        UserError: for a GPU on a machine that has none.
    """
    if asked in (None, "auto"):
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("the device is cuda, but this machine has no usable CUDA device")
    return torch.device(asked)


def choose_precision(asked: str, device: torch.device) -> str:
    """The precision in Fabric's words; `auto` is mixed on a GPU."""
    if asked != "auto":
        return asked
    return "bf16-mixed" if device.type == "cuda" else "32-true"


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """What evaluation in this precision stands under, as training does by Fabric."""
    if precision == "bf16-mixed":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
