"""Chooses between exact ways to the same result, by how long each took."""

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import torch

from deepmoe.timing import timed

T = TypeVar("T")
C = TypeVar("C", bound=Hashable)
TRIALS = 3  # timed runs of each way
HOPELESS = 4.0  # a way that takes so many times as long as another is not tried again


class Planner(Generic[C]):
    """Measures every way a few times when a case comes up, then always takes the fastest.

    All ways give the same result, so that what is measured is also used: planning costs the time
    of the slower ways, a few times for each case.
    """

    def __init__(self) -> None:
        self.times: dict[C, dict[str, list[float]]] = {}
        self.chosen: dict[C, str] = {}

    def run(
        self,
        case: C,
        ways: Mapping[str, Callable[[], T]],
        device: torch.device,
        warm_up: int = 1,
    ) -> T:
        """Runs the way that is best for a case, or that has still to be measured.

        Args:
            case: what the decision depends on.
            ways: by name; all must give the same result.
            device: to wait for when measuring.
            warm_up: runs of each way before those that count.
        """
        if len(ways) == 1:
            return next(iter(ways.values()))()
        if case in self.chosen:
            return ways[self.chosen[case]]()
        times = self.times.setdefault(case, {name: [] for name in ways})
        # In turn, so that all ways see the same state of caches and neighbours.
        name = min(_open(times, warm_up), key=lambda n: len(times[n]))
        result, seconds = timed(ways[name], device)
        times[name].append(seconds)
        if not _open(times, warm_up):
            self.times[case] = {n: t[warm_up:] for n, t in times.items()}
            medians = {n: self.median(case, n) for n, t in self.times[case].items() if t}
            self.chosen[case] = min(medians, key=lambda n: medians[n])
        return result

    def median(self, case: C, way: str) -> float:
        """How long a way takes, for a case that is decided."""
        return statistics.median(self.times[case][way])


def _open(times: Mapping[str, list[float]], warm_up: int) -> list[str]:
    """Ways that are to be run once more before the decision."""
    tried = {n: min(t) for n, t in times.items() if len(t) > TRIALS}
    best = min(tried.values(), default=float("inf"))
    return [
        n
        for n, t in times.items()
        if len(t) < warm_up + TRIALS and tried.get(n, 0.0) <= HOPELESS * best
    ]
