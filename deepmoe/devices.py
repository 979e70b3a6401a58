"""Which device and precision to use, from what a configuration asks for."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepmoe.errors import UserError, reason


def choose_device(asked: str | torch.device | None = "auto") -> torch.device:
    """The device; `auto` is a GPU where there is one.

    Raises:
        UserError: for a device that this machine does not have.
    """
    if asked is None or asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if str(asked).startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"the device is {asked}, but this machine has no usable CUDA device")
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except Exception as error:  # of many kinds
        raise UserError(f"no device here is called {asked!r}: {reason(error)}") from error
    return device


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
