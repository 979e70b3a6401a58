"""Choosing between ways by how long they took."""

import itertools
from pathlib import Path

import pytest
import torch

from deepmoe import timing
from deepmoe.errors import UserError
from deepmoe.sparse.planner import TRIALS, Plan, Planner, in_words

CPU = torch.device("cpu")


class Clock:
    """A clock that stands still but for what the ways say they take."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def way(self, name: str, *seconds: float):
        durations = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def run() -> str:
            self.now += next(durations)
            return name

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_every_way_is_tried_in_turn_and_the_fastest_is_kept(clock: Clock) -> None:
    planner, ways = Planner([]), {"slow": clock.way("slow", 2.0), "fast": clock.way("fast", 1.0)}
    ran = [planner.run("case", ways, CPU) for _ in range(2 * (TRIALS + 1) + 5)]
    assert ran == ["slow", "fast"] * (TRIALS + 1) + ["fast"] * 5
    assert planner.chosen == {"case": "fast"}


def test_the_first_run_of_a_way_does_not_count(clock: Clock) -> None:
    planner = Planner([])
    ways = {"dense": clock.way("dense", 1.0), "compiled": clock.way("compiled", 50.0, 0.5)}
    for _ in range(2 * (TRIALS + 1)):
        planner.run("case", ways, CPU)
    assert planner.chosen == {"case": "compiled"}


def test_a_hopeless_way_is_not_warmed_up_to_the_end(clock: Clock) -> None:
    planner = Planner([])
    ways = {"dense": clock.way("dense", 1.0), "hopeless": clock.way("hopeless", 100.0)}
    ran = [planner.run("case", ways, CPU, warm_up=20) for _ in range(60)]
    assert ran.count("hopeless") == TRIALS + 1
    assert planner.chosen == {"case": "dense"}


def test_cases_are_decided_apart_and_a_single_way_needs_no_plan(clock: Clock) -> None:
    planner = Planner([])
    for case, quick in (("small", "a"), ("large", "b")):
        ways = {name: clock.way(name, 1.0 if name == quick else 2.0) for name in "ab"}
        for _ in range(2 * (TRIALS + 1)):
            planner.run(case, ways, CPU)
    assert planner.chosen == {"small": "a", "large": "b"}
    assert planner.run("other", {"only": lambda: "only"}, CPU) == "only"
    assert "other" not in planner.times


def test_a_plan_is_followed_and_nothing_is_measured(clock: Clock) -> None:
    ways = {"a": clock.way("a", 1.0), "b": clock.way("b", 2.0)}
    planner = Planner(["c", "b", "a"], {in_words(("known", 1)): "a", in_words("odd"): "gone"})
    assert planner.run(("known", 1), ways, CPU) == "a"
    assert planner.run("unknown", ways, CPU) == "b"  # the first that there is, always
    assert planner.run("odd", ways, CPU) == "b"
    assert not planner.times


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan, other = Plan({"[1]": "dense"}, {"[2]": "direct"}), Plan({"[3]": "dynamic"}, {})
    (plan | other).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan(
        {"[1]": "dense", "[3]": "dynamic"}, {"[2]": "direct"}
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"[" * 100000, b'{"format": "deepmoe plan", "network": {"a": 1}}', b"\xff"],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(UserError, match="is not a plan of the sparse engine"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(UserError, match="is not a plan"):
        Plan.load(tmp_path)
