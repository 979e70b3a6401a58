"""The sum at the end of a residual block."""

import torch.nn.functional as F
from torch import Tensor


def onto_stream(stream_BCHW: Tensor, y_BCHW: Tensor, at: Tensor | None) -> Tensor:
    """relu(stream + y), where y may hold only some of the stream's channels: those at `at`."""
    if at is None:
        return F.relu(stream_BCHW + y_BCHW)
    return F.relu(stream_BCHW.index_add(1, at, y_BCHW.to(stream_BCHW.dtype)))
