"""Where half precision would not do."""

import torch
from torch import Tensor


def at_least_single(x: Tensor) -> Tensor:
    """The tensor in single precision, or in double if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
