"""Progress in a log and on a terminal, by a clock that the test moves."""

import io
import sys

import pytest

from deepmoe.busy_cores import BusyCores, thread_hint
from deepmoe.progress import Display, followed, is_shown, progress, showing


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class ByHand(Display):
    """A display without a thread: the test says when it tells."""

    def start(self) -> None:
        pass


def cores(clock: Clock, others: float, own: float) -> BusyCores:
    """Two cores, on which others and this process are busy all the time."""
    read = lambda: ((others + own) * clock.now, own * clock.now)  # noqa: E731
    found = BusyCores(clock, read)
    found.count = 2
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_lines_say_what_is_under_way_and_how_far_it_is(clock, capsys) -> None:
    display = ByHand(clock, cores(clock, 0, 0), terminal=False)
    with showing(display=display):
        assert is_shown()
        display.tell()  # nothing is under way
        with progress("net", 300, "batches", done=100) as work:
            clock.now += 10
            work.advance(50)
            work.note = "loss 1.5"
            display.tell()
            seen = []
            for number in followed(iter(range(3)), "evaluating", None, "images"):
                seen.append(number)
                clock.now += 200
            display.tell()
            for _ in followed([7], "counting", 1):
                display.tell()
    assert not is_shown() and seen == [0, 1, 2]
    out, told = capsys.readouterr()
    assert out == ""  # results alone
    assert told.splitlines() == [
        "net: 150 of 300 batches, loss 1.5, 10 s, about 30 s left",
        "net: 150 of 300 batches, loss 1.5, 10 min, about 30 min left",
        "net, counting: 0 of 1, 0 s",
    ]


def test_nobody_is_told_unless_it_is_switched_on(clock, capsys) -> None:
    display = ByHand(clock, cores(clock, 0, 0), terminal=False)
    with showing(display=display), showing(False), progress("quiet"):
        assert not is_shown() and display.under_way == []
    with progress("silent") as work:  # as in any call from Python
        work.advance()
    with showing(), progress("off"):  # tests have DEEPMOE_PROGRESS=0
        assert not is_shown()
    assert capsys.readouterr().err == ""


def test_work_that_is_given_up_leaves_nothing_behind(clock) -> None:
    display = ByHand(clock, cores(clock, 0, 0), terminal=False)
    with showing(display=display):
        items = followed(range(9), "looking", 9)
        next(items)
        assert len(display.under_way) == 1
        items.close()
        with pytest.raises(KeyError), progress("failing"):
            raise KeyError
        assert display.under_way == []


def test_a_terminal_gets_a_bar_that_goes_away(clock, monkeypatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    display = ByHand(clock, cores(clock, 0, 0))
    assert display.terminal
    with showing(display=display), progress("[red]net", 4, "batches") as work:
        work.advance()
        display.tell()
    drawn = terminal.getvalue()
    assert "[red]net: 1 of 4 batches" in drawn
    assert "\x1b[2K" in drawn.rpartition(" left")[2] and display._bars is None  # erased


def test_a_hint_names_what_to_set_once(clock, capsys, monkeypatch) -> None:
    monkeypatch.setattr("deepmoe.progress._threads", lambda: 2)
    display = ByHand(clock, cores(clock, others=1.0, own=0.9), terminal=False)
    with showing(display=display), progress("net"):
        for _ in range(3):
            clock.now += 6
            display.tell()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    (hint,) = [line for line in lines if line.startswith("Hint: ")]
    assert "other processes keep 1.0 of 2 cores busy" in hint and "OMP_NUM_THREADS=1" in hint


@pytest.mark.parametrize(
    ("others", "count", "threads", "free"),
    [(0.2, 2, 2, None), (1.0, 2, 1, None), (2.0, 2, 2, 1), (3.0, 8, 8, 5), (3.0, 8, 4, None)],
)
def test_a_hint_is_for_threads_that_have_no_core(others, count, threads, free) -> None:
    hint = thread_hint(others, count, threads)
    assert hint is None if free is None else f"OMP_NUM_THREADS={free}," in hint


def test_own_work_is_not_that_of_others(clock) -> None:
    busy = cores(clock, others=0.0, own=2.0)
    clock.now += 10
    assert busy.others() == pytest.approx(0)
    unknown = BusyCores(clock, lambda: None)
    clock.now += 10
    assert unknown.others() is None
