"""What a table or figure of the paper is here: its runs, the paper's figures, how it is shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmoe.paper.plan import Plan
from deepmoe.paper.scales import Scale
from deepmoe.paper.sources import SOURCES
from deepmoe.sweep import RunResult
from deepmoe.sweep.steps import last_checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 1e18  # of any figure
Line = dict[str, Any]
"""A row with its figures, as plain values."""
Like = dict[Any, Any]
"""What plain values are, as `measured.fits` takes it."""


@dataclass(frozen=True)
class Row:
    """A network of a table, or a point of a figure.

    Attributes:
        labels: what it is, an idea a column, by the column's title.
        runs: names, a seed each; none for what only the paper has.
        paper: its figures, by column.
        curve: that it is a point of, in a figure.
        part: of what is measured of its runs, where that has several.
    """

    labels: Mapping[str, str]
    runs: tuple[str, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict)
    curve: str = ""
    part: str = ""

    @property
    def title(self) -> str:
        """All labels in a line."""
        return ", ".join(filter(None, self.labels.values()))


@dataclass(frozen=True)
class Column:
    """A figure of each row.

    Attributes:
        key: in rows and in the paper's figures.
        title: for people.
        unit: `%`, `points`, `MACs`, `count` or `bytes`.
        compared: whether the difference from the paper's figure is shown, at the full scale.
    """

    key: str
    title: str
    unit: str = "%"
    compared: bool = False


@dataclass(frozen=True)
class Shown:
    """A table as people read it."""

    title: str
    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Made:
    """What the runs of a page came to.

    Attributes:
        plan: of its runs.
        folder: of the runs' own folders.
        results: of finished runs, by name.
        measured: of their checkpoints, by name.
        lines: the rows with their figures.
    """

    plan: Plan
    folder: Path
    results: Mapping[str, RunResult]
    measured: Mapping[str, Line] = field(default_factory=dict)
    lines: tuple[Line, ...] = ()

    def checkpoint(self, run: str) -> Path:
        """What a finished run has left."""
        return last_checkpoint(self.folder, run)


@dataclass(frozen=True)
class Page:
    """A table or figure of the paper.

    Attributes:
        name: on the command line.
        title: what it shows.
        data: keys of the data sets it is of.
        takes: how long it takes, by scale.
        shortened: what the short scale leaves out of the paper's schedule; `{epochs}` stands for
            its own.
        rows: adds its runs to a plan, and gives its rows.
        columns: of the table.
        plot: of what was made.
        notes: what the paper says beyond figures, or does not say.
        measure: figures of a run beyond those of its last epoch, from its checkpoint; they are
            kept in the run's folder.
        measures: what these figures are: what was kept may have been changed by anybody.
        more: other tables, of what was made.
    """

    name: str
    title: str
    data: tuple[str, ...]
    takes: Mapping[str, str]
    shortened: str
    rows: Callable[[Plan], Sequence[Row]]
    columns: tuple[Column, ...]
    plot: Callable[[Made], "Figure"]
    notes: tuple[str, ...] = ()
    measure: Callable[[Path, Plan], Line] | None = None
    measures: Like = field(default_factory=dict)
    more: Callable[[Made], Sequence[Shown]] | None = None

    def shortened_at(self, scale: Scale) -> str:
        """What a scale leaves out of the paper's schedule, with its own number of epochs."""
        return self.shortened.format(epochs=scale.epochs(SOURCES[self.data[0]].kind))


# Of every page that has ours beside dense networks: what else differs than the gates.
MORE_TRAINING = (
    "Ours has twice the epochs of the dense rows, its start's included, and teachers. So its "
    "difference from them is not what gates are worth: docs/recipe.md has that."
)
ERROR = Column("error", "error", compared=True)
MACS = Column("macs", "MACs", "MACs")
