"""GPU kernels that PyTorch has no operator for. Imported on first use of a CUDA device only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def"

BLOCK = 256


@triton.jit
def _collect_kernel(
    source, outs, ins, out, taps, inputs, active, BLOCK: tl.constexpr
):  # pragma: no cover
    """One tap of one output channel: its weights of the active input channels."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < active
    output = tl.load(outs + row // taps)
    start = (output * taps + row % taps) * inputs
    channel = tl.load(ins + columns, mask=inside, other=0)
    value = tl.load(source + start + channel, mask=inside)
    tl.store(out + row.to(tl.int64) * active + columns, value, mask=inside)


def collect(weight: Tensor, outs: Tensor, ins: Tensor) -> Tensor:
    """weight[outs][:, ins] in one pass, for weights whose channels lie last in memory."""
    taps = weight.shape[2] * weight.shape[3]
    flat = weight.permute(0, 2, 3, 1)
    assert flat.is_contiguous()
    out = torch.empty(
        len(outs), *weight.shape[2:], len(ins), dtype=weight.dtype, device=weight.device
    )
    grid = (len(outs) * taps, triton.cdiv(len(ins), BLOCK))
    _collect_kernel[grid](flat, outs, ins, out, taps, weight.shape[1], len(ins), BLOCK=BLOCK)
    return out.permute(0, 3, 1, 2)
