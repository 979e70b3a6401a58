"""Which images of a batch run the same channels."""

from collections import defaultdict
from functools import cache

import torch
from torch import Tensor

from deepmoe.layers import Gates


def route_numbers(gates: Gates) -> Tensor:
    """For each image a number that stands for its route: which channels it runs.

    Routes that are alike have the same number, and others nearly always another one: comparing
    whole routes would take longer than the network.
    """
    patterns = torch.cat([g > 0 for g in gates], dim=1)
    return (patterns * _keys(patterns.shape[1], patterns.device)).sum(dim=1)


def parts_by_route(gates: Gates, numbers: list[int] | None = None) -> list[Tensor]:
    """The images of a batch, grouped by which channels they run.

    Args:
        gates: of the batch.
        numbers: their `route_numbers`, if known.
    """
    device = gates[0].device
    if len(gates[0]) == 1:
        return [torch.zeros(1, dtype=torch.long, device=device)]
    images = defaultdict(list)
    for image, number in enumerate(route_numbers(gates).tolist() if numbers is None else numbers):
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


@cache
def _keys(channels: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2**62, (channels,), generator=generator).to(device)
