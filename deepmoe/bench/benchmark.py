"""What a benchmark says: a sentence, a table with a legend, and on demand the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from deepmoe.console import table_text
from deepmoe.figures import bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT_EQUAL = 0.05  # of the time: a smaller difference is not told as one


class Timed(NamedTuple):
    """One line of the table."""

    name: str
    time: float
    meaning: str  # in the legend


@dataclass(frozen=True)
class Benchmark:
    """Times that were measured side by side, in one run.

    `str()` is for people, `details()` has the rest, and `as_dict()` everything as plain values.

    Attributes:
        values: all that was measured.
    """

    values: Mapping[str, Any]

    unit = "ms"

    @property
    def sentence(self) -> str:
        """What was found, in one sentence."""
        raise NotImplementedError

    def timed(self) -> list[Timed]:
        """What was timed; the first is what the others are compared with."""
        raise NotImplementedError

    def table(self) -> str:
        """Times, and how they compare with the first."""
        timed = self.timed()
        rows = [
            (t.name, f"{t.time:.{2 if t.time < 100 else 0}f}", f"{timed[0].time / t.time:.2f}")
            for t in timed
        ]
        return table_text(("", self.unit, f"times as fast as {timed[0].name}"), rows)

    def setting(self) -> str:
        """What it was measured on."""
        raise NotImplementedError

    def details(self) -> str:
        """Everything that was measured, a line each."""
        return "\n".join(_lines(self.values))

    def __str__(self) -> str:
        legend = [f"{t.name}: {t.meaning}" for t in self.timed()]
        return "\n".join([self.sentence, self.table(), *legend, self.setting()])

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return dict(self.values)

    def plot(self) -> "Figure":
        """The times as bars."""
        times = {t.name: t.time for t in self.timed()}
        return bars(times, self.unit, self.sentence, "{:.2f}")


def milliseconds(time: float) -> str:
    """A time of two digits or more."""
    return f"{time:.1f}" if time >= 1 else f"{time:.2g}"


def compared(time: float, other: float) -> str:
    """How a time compares with another one, in words."""
    if abs(time / other - 1) <= ABOUT_EQUAL:
        return "about as fast"
    if time < other:
        return f"{other / time:.1f} times as fast"
    return f"{time / other:.1f} times as slow"


def _lines(values: Any, name: str = "") -> list[str]:
    if isinstance(values, Mapping):
        start = f"{name}." if name else ""
        return [line for key, value in values.items() for line in _lines(value, f"{start}{key}")]
    if isinstance(values, list) and all(isinstance(value, float) for value in values):
        return [f"{name}: {', '.join(f'{value:.4g}' for value in values)}"]
    return [f"{name}: {values:.4g}" if isinstance(values, float) else f"{name}: {values}"]
