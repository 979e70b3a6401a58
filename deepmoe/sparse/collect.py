"""Copies the weights of active rows and columns out of a layer, into memory that is used again."""

from functools import cache

import torch
from torch import Tensor

from deepmoe.sparse.threads import run_on_threads


class Collector:
    """Collects weights; what it returns is good until it is called again."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def collect(self, weight: Tensor, outs: Tensor | None, ins: Tensor | None) -> Tensor:
        """weight[outs][:, ins], where `None` takes all; channels last where inputs are chosen.

        Args:
            weight: (O, I, K, K), contiguous on a CPU, channels last on a GPU.
            outs: numbers of the output channels.
            ins: numbers of the input channels.
        """
        if weight.device.type == "cpu":
            return self._on_cpu(weight, outs, ins)
        return _on_gpu(weight, outs, ins)

    def _on_cpu(self, weight: Tensor, outs: Tensor | None, ins: Tensor | None) -> Tensor:
        if ins is None:
            return weight if outs is None else weight.index_select(0, outs)
        if weight.dtype != torch.float32:
            part = weight if outs is None else weight.index_select(0, outs)
            return part.index_select(1, ins)
        from deepmoe.sparse import numba_kernels

        outs = _every(len(weight)) if outs is None else outs
        out = self._room_for(weight, (len(outs), len(ins), *weight.shape[2:]))
        taps = weight.shape[2] * weight.shape[3]
        sizes = (weight.shape[1], taps, len(outs), len(ins))
        pieces = -(-len(outs) // numba_kernels.ROWS)
        run_on_threads(numba_kernels.collect.ctypes, pieces, [*sizes, weight, outs, ins, out])
        return out

    def _room_for(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        # Fresh memory would have to be mapped page by page, which takes longer than the copy.
        count = torch.Size(shape).numel()
        if self.memory.dtype != weight.dtype or self.memory.numel() < count:
            self.memory = weight.new_empty(max(count, self.memory.numel()))
        outs, ins, height, width = shape
        return self.memory[:count].view(outs, height, width, ins).permute(0, 3, 1, 2)


@cache
def _every(count: int) -> Tensor:
    return torch.arange(count)


def _on_gpu(weight: Tensor, outs: Tensor | None, ins: Tensor | None) -> Tensor:
    if outs is None and ins is None:
        return weight
    from deepmoe.sparse.triton_kernels import collect

    outs = torch.arange(len(weight), device=weight.device) if outs is None else outs
    ins = torch.arange(weight.shape[1], device=weight.device) if ins is None else ins
    return collect(weight, outs, ins)
