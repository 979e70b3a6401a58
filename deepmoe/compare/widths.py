"""How many channels each group keeps, so that a network comes down to a share of its MACs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepmoe.costs import Size, cost_matrix, least, macs_of_counts, marginal_macs
from deepmoe.errors import UserError
from deepmoe.graph import Gating

Widths = tuple[int, ...]
"""Channels that stay of each group that can lose some."""
FEWEST = 1 / 32  # of a group's channels, that stay whatever they are worth
MOST_MULTIPLE = 8  # that widths are kept at: odd ones are slow on many devices


def widths_for(
    gating: Gating, size: Size, importance: Sequence[Tensor], share: float, tilt: float
) -> Widths:
    """Widths between equal shares of all groups and what their channels are worth for each MAC.

    First-order importance overstates how much groups differ once most channels are gone, so that
    the best widths lie between both. What rounding leaves of the cost is spent, too.

    Args:
        gating: covers the groups.
        size: of input images.
        importance: of each group's channels.
        share: of the network's MACs.
        tilt: how far groups may differ in the share of channels they keep, from 0 to 1.
    """
    full = torch.tensor(gating.widths, dtype=torch.float64)
    macs = _macs(gating, size)
    target = share * macs(full)
    relative = _by_worth(cost_matrix(gating, size), full, importance, target) / full

    def shrunk(divisor: float) -> Tensor:
        return _rounded(full, full * relative**tilt / divisor)

    _check_reach(share, macs(shrunk(float("inf"))), macs(full))
    whole, tiny = float(relative.min()) ** tilt, 2.0 * float(full.max())
    divisor = least(lambda divisor: macs(shrunk(divisor)) <= target, whole, tiny)
    return _all_spent(shrunk(divisor), full * relative**tilt / divisor, full, macs, target)


def even_widths(gating: Gating, size: Size, share: float, fixed: Sequence[bool]) -> Widths:
    """The same share of every group, but for those that keep all.

    Args:
        gating: covers the groups.
        size: of input images.
        share: of the network's MACs.
        fixed: for each group, whether it keeps all its channels.
    """
    full = torch.tensor(gating.widths, dtype=torch.float64)
    whole = torch.tensor(list(fixed))
    macs = _macs(gating, size)
    target = share * macs(full)

    def shrunk(divisor: float) -> Tensor:
        return torch.where(whole, full, _rounded(full, full / divisor))

    _check_reach(share, macs(shrunk(float("inf"))), macs(full))
    divisor = least(lambda d: macs(shrunk(d)) <= target, 1.0, 2.0 * float(full.max()))
    return _all_spent(shrunk(divisor), full / divisor, full, macs, target)


def widths_by_threshold(
    gating: Gating, size: Size, share: float, scores: Sequence[Tensor | None]
) -> Widths:
    """What is left where one threshold for all groups closes the channels of lower scores.

    Every group keeps a few, whatever they score: a threshold alone may empty a layer.

    Args:
        gating: covers the groups.
        size: of input images.
        share: of the network's MACs.
        scores: of each group's channels; `None` for groups that keep all.
    """
    full = torch.tensor(gating.widths, dtype=torch.float64)
    macs = _macs(gating, size)
    judged = [(s, group) for group, part in enumerate(scores) if part is not None for s in part]
    weakest_first = [group for _, group in sorted(judged, key=lambda pair: float(pair[0]))]
    fewest = (full * FEWEST).ceil()

    def without(count: float) -> Tensor:
        gone = torch.bincount(
            torch.tensor(weakest_first[: int(count)], dtype=torch.int64), minlength=len(full)
        )
        return torch.maximum(fewest, full - gone)

    _check_reach(share, macs(without(len(weakest_first))), macs(full))
    target = share * macs(full)
    count = least(lambda c: macs(without(c)) <= target, 0, len(weakest_first))
    return _as_widths(without(count))


def strongest(scores: Sequence[Tensor], widths: Sequence[int]) -> tuple[Tensor, ...]:
    """For each group, a mask of the channels that score highest; the first of equal ones."""
    masks = []
    for part, count in zip(scores, widths, strict=True):
        best = part.argsort(descending=True, stable=True)[:count].cpu()
        masks.append(torch.zeros(len(part), dtype=torch.bool).index_fill_(0, best, True))
    return tuple(masks)


def _all_spent(
    widths: Tensor, wanted: Tensor, full: Tensor, macs: Callable[[Tensor], float], target: float
) -> Widths:
    """Widths with what rounding has left of a cost: it goes to groups that are shortest.

    Methods are compared at one cost, and coarse widths may leave a tenth of it unspent.
    """
    step = _multiple(full)
    while True:
        shortest_first = (widths / wanted).argsort(stable=True).tolist()
        wider = [
            torch.minimum(full, widths + step * _one_hot(len(full), i)) for i in shortest_first
        ]
        fitting = [w for w in wider if not torch.equal(w, widths) and macs(w) <= target]
        if not fitting:
            return _as_widths(widths)
        widths = fitting[0]


def _macs(gating: Gating, size: Size) -> Callable[[Tensor], float]:
    quadratic = cost_matrix(gating, size)
    return lambda widths: macs_of_counts(widths[None], quadratic).item()


def _check_reach(share: float, fewest: float, whole: float) -> None:
    if not fewest <= share * whole <= whole:
        raise UserError(
            f"pruning can't leave {share:g} of the MACs: "
            f"this network goes from 1 down to {fewest / whole:.3f}"
        )


def _by_worth(
    quadratic: Tensor, full: Tensor, importance: Sequence[Tensor], target: float
) -> Tensor:
    """Widths when channels go one by one, always the one that is worth least for its cost."""
    weakest_first = [part.sort().values.tolist() for part in importance]
    widths, fewest = full.clone(), (full * FEWEST).clamp_min(1)
    while macs_of_counts(widths[None], quadratic).item() > target:
        costs = marginal_macs(quadratic, widths).tolist()
        removed = (full - widths).long().tolist()
        worth = [
            values[gone] / max(cost, 1.0) if width > least_width else float("inf")
            for values, gone, cost, width, least_width in zip(
                weakest_first, removed, costs, widths.tolist(), fewest.tolist(), strict=True
            )
        ]
        cheapest = min(range(len(worth)), key=worth.__getitem__)
        if worth[cheapest] == float("inf"):
            break
        widths[cheapest] -= 1
    return widths


def _rounded(full: Tensor, wanted: Tensor) -> Tensor:
    """Widths that a device likes, not above the full ones."""
    multiple = _multiple(full)
    fewest = torch.minimum(full, (full * FEWEST / multiple).ceil().clamp_min(1) * multiple)
    return torch.minimum(full, torch.maximum(fewest, (wanted / multiple).round() * multiple))


def _multiple(full: Tensor) -> Tensor:
    return 2 ** (full / 16).clamp(1, MOST_MULTIPLE).log2().floor()  # small groups have few to spare


def _one_hot(length: int, index: int) -> Tensor:
    return torch.zeros(length, dtype=torch.float64).index_fill_(0, torch.tensor(index), 1.0)


def _as_widths(widths: Tensor) -> Widths:
    return tuple(widths.long().tolist())
