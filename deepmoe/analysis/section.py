"""What a page is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from deepmoe.analysis.contenders import Contender
from deepmoe.config import RunConfig
from deepmoe.evaluation.pictures import Picture


@dataclass(frozen=True)
class Subject:
    """The model that a page is about.

    Attributes:
        name: of the network.
        data: that it was evaluated on.
        checkpoint: its file's name.
        config: of the run that trained it.
        metrics: of that run, a line an epoch; none if they are not there.
        beside: other networks, on the same images.
    """

    name: str
    data: str
    checkpoint: str
    config: RunConfig
    metrics: Sequence[dict[str, Any]] = ()
    beside: tuple[Contender, ...] = ()


@dataclass(frozen=True)
class Table:
    """Rows under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """One part of a page.

    Attributes:
        title: its heading.
        text: sentences, a paragraph each.
        figures: by file name; each is drawn with its description.
        pictures: groups of images, by heading.
        table: `None` for none.
        folded: whether the table is shown on a click only.
    """

    title: str
    text: Sequence[str] = ()
    figures: dict[str, tuple[Figure, str]] = field(default_factory=dict)
    pictures: dict[str, tuple[Picture, ...]] = field(default_factory=dict)
    table: Table | None = None
    folded: bool = False
