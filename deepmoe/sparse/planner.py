"""Chooses between exact ways to the same result: by how long each took, or by a saved plan.

Ways differ in rounding. Where two processes are to give the same bits, one saves its plan and the
other loads it.
"""

import json
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from deepmoe.errors import UserError
from deepmoe.files import read_regular, write_atomically
from deepmoe.timing import timed

T = TypeVar("T")
C = TypeVar("C", bound=Hashable)
TRIALS = 3  # timed runs of each way
HOPELESS = 4.0  # a way that takes so many times as long as another is not tried again
MOST_BYTES = 64 * 2**20  # of a plan's file
FORMAT = "deepmoe plan"
START = f'{{\n  "format": "{FORMAT}"'.encode()  # of its file


@dataclass(frozen=True)
class Plan:
    """Which way each case is run, by the case in words; other cases go a way that never changes.

    An empty plan measures nothing: right for a few images.
    """

    network: Mapping[str, str] = field(default_factory=dict)  # whole batches
    layers: Mapping[str, str] = field(default_factory=dict)  # single convolutions

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        values = {"format": FORMAT, "network": dict(self.network), "layers": dict(self.layers)}
        write_atomically(Path(path), (json.dumps(values, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan.

        Raises:
            UserError: for a file that can't be read, or is none.
        """
        path = Path(path)
        try:
            values = json.loads(read_regular(path, MOST_BYTES).decode("utf-8"))
            parts = (values["network"], values["layers"])
            if values["format"] != FORMAT or not all(map(_maps_texts, parts)):
                raise ValueError("another format")
            return cls(*parts)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is not a plan of the sparse engine: {error}") from error

    def __or__(self, other: "Plan") -> "Plan":
        """Both plans together."""
        return Plan({**self.network, **other.network}, {**self.layers, **other.layers})


class Planner(Generic[C]):
    """Runs each case by its plan, or else measures every way a few times and takes the fastest.

    All ways give the same result, so that what is measured is also used: planning costs the time
    of the slower ways, a few times for each case.

    Args:
        preferred: ways, the one to take first, for cases that a plan does not know.
        plan: ways by case; `None` measures.
    """

    def __init__(self, preferred: Sequence[str], plan: Mapping[str, str] | None = None) -> None:
        self.preferred = preferred
        self.plan = plan
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
        if case not in self.chosen and self.plan is not None:
            self.chosen[case] = self._planned(case, ways)
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
        """How long a way takes, for a case that was measured."""
        return statistics.median(self.times[case][way])

    def _planned(self, case: C, ways: Mapping[str, Any]) -> str:
        assert self.plan is not None
        planned = self.plan.get(in_words(case), "")
        return next(name for name in (planned, *self.preferred) if name in ways)


def in_words(case: Hashable) -> str:
    """A case as a plan's file names it."""
    return json.dumps(case)


def _maps_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(way, str) for way in value.values())


def _open(times: Mapping[str, list[float]], warm_up: int) -> list[str]:
    """Ways that are to be run once more before the decision."""
    tried = {n: min(t) for n, t in times.items() if len(t) > TRIALS}
    best = min(tried.values(), default=float("inf"))
    return [
        n
        for n, t in times.items()
        if len(t) < warm_up + TRIALS and tried.get(n, 0.0) <= HOPELESS * best
    ]
