"""Some images of a batch: those that run the same channels, or that go on at all."""

from collections import defaultdict
from functools import cache

import torch
from torch import Tensor

from deepmoe.layers import Gates
from deepmoe.sparse.few_inputs import has_triton


def routes_of(g_BC: Tensor) -> tuple[Tensor, Tensor]:
    """For each image a number that stands for its route, and how many channels run.

    Routes that are alike have the same number, and others nearly always another one: comparing
    whole routes would take longer than the network.
    """
    keys_C = _keys(g_BC.shape[1], g_BC.device)
    if g_BC.is_cuda and has_triton():
        from deepmoe.sparse import triton_kernels

        return triton_kernels.routes(g_BC, keys_C)
    runs_BC = g_BC > 0
    return (runs_BC * keys_C).sum(dim=1), runs_BC.sum(dim=1)


def parts_by_route(gates: Gates, numbers: list[int] | None = None) -> list[Tensor]:
    """The images of a batch, grouped by which channels they run.

    Args:
        gates: of the batch.
        numbers: of their routes, if known.
    """
    device = gates[0].device
    if len(gates[0]) == 1:
        return [torch.zeros(1, dtype=torch.long, device=device)]
    if numbers is None:
        numbers = routes_of(torch.cat(gates, dim=1))[0].tolist()
    images = defaultdict(list)
    for image, number in enumerate(numbers):
        images[number].append(image)
    parts = [torch.tensor(part, device=device) for part in images.values()]
    patterns = torch.cat([g > 0 for g in gates], dim=1)
    if all((patterns[part] == patterns[part[0]]).all() for part in parts if len(part) > 1):
        return parts
    # Two routes have the same number.
    routes, member = patterns.unique(dim=0, return_inverse=True)
    return [(member == number).nonzero().flatten() for number in range(len(routes))]


def in_order(outputs: Tensor, images: Tensor) -> Tensor:
    """Outputs in the order of the batch; `images` says which ones they are of."""
    return torch.empty_like(outputs).index_copy_(0, images, outputs)


def images_of(x: Tensor, images: Tensor) -> Tensor:
    """Some images of a batch in its memory format, which `index_select` alone would not keep."""
    if x.is_contiguous():
        return x.index_select(0, images)
    return x.permute(0, 2, 3, 1).index_select(0, images).permute(0, 3, 1, 2)


def roughly(count: int) -> int:
    """The next of a few numbers that is not smaller: eight from one power of two to the next."""
    step = max(1, 2 ** (count.bit_length() - 4))
    return -(-count // step) * step


@cache
def _keys(channels: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2**62, (channels,), generator=generator).to(device)
