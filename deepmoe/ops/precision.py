"""Half precision, and where it would not do."""

import torch
from torch import Tensor


def at_least_single(x: Tensor) -> Tensor:
    """The tensor in single precision, or in double if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_half(dtype: torch.dtype) -> bool:
    """Whether numbers take 16 bits."""
    return dtype in (torch.bfloat16, torch.float16)
