"""Routes: which channels images run, how often a route repeats, and how alike routes are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepmoe.errors import UserError
from deepmoe.evaluation.gate_record import GateRecord


@dataclass(frozen=True)
class LayerRoutes:
    """What the gates of one layer do, or those of all layers side by side.

    Attributes:
        name: of the layer.
        channels: that have a gate.
        always: how many of them run for every image.
        never: how many run for none.
        distinct: different sets of channels that run.
        rank: of the matrix of patterns: a row an image, 1 where a channel runs, else 0.
        within: share of the channels that two images of one class switch alike; `None` where no
            class has two images.
        between: the same for two images of different classes.
    """

    name: str
    channels: int
    always: int
    never: int
    distinct: int
    rank: int
    within: float | None
    between: float | None


@dataclass(frozen=True)
class ClassRoutes:
    """The routes of one class: how many there are, and how many images take the commonest."""

    name: str
    images: int
    distinct: int
    commonest: int
    active: float  # share of the gated channels that run


@dataclass(frozen=True)
class Routes:
    """The routes of a set of images: a route is the set of all channels that run.

    Attributes:
        images: that came to the base network; exits answered the others.
        counts: how many images take each route, the commonest first.
        shared: routes that images of several classes take; `None` where images have no class.
        joined: all layers side by side.
        layers: each gated layer.
        classes: that have images, in order.
    """

    images: int
    counts: tuple[int, ...]
    shared: int | None
    joined: LayerRoutes
    layers: tuple[LayerRoutes, ...]
    classes: tuple[ClassRoutes, ...]

    @property
    def distinct(self) -> int:
        """Number of different routes."""
        return len(self.counts)

    @property
    def alone(self) -> int:
        """Routes that one image takes, and no other."""
        return sum(count == 1 for count in self.counts)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"distinct": self.distinct, "alone": self.alone, **asdict(self)}


def count_routes(record: GateRecord) -> Routes:
    """Counts and compares the routes of a record.

    Raises:
        UserError: for a record without gates, or one whose images all left by exits.
    """
    if not record.gates:
        raise UserError("a network without gates has one route, which all images take")
    ran = np.ones(len(record), dtype=bool) if record.exited is None else ~record.exited
    if not ran.any():
        raise UserError("exits have answered all images: none has taken a route")
    # Images without a class are alike to none: each is a class of its own.
    labels = np.flatnonzero(ran) if record.labels is None else record.labels[ran]
    patterns = [gates[ran] != 0 for gates in record.gates]
    joined = np.concatenate(patterns, axis=1)
    numbers = route_numbers(joined)
    counts = np.bincount(numbers)
    takers = {(int(route), int(label)) for route, label in zip(numbers, labels, strict=True)}
    classes_of = np.bincount([route for route, _ in takers])
    return Routes(
        images=len(labels),
        counts=tuple(sorted(counts.tolist(), reverse=True)),
        shared=None if record.labels is None else int((classes_of > 1).sum()),
        joined=_layer("all layers", joined, labels),
        layers=tuple(
            _layer(name, pattern, labels)
            for name, pattern in zip(record.layer_names, patterns, strict=True)
        ),
        classes=(
            ()
            if record.labels is None
            else tuple(_classes(record.class_names, labels, numbers, joined))
        ),
    )


def route_numbers(patterns_NC: np.ndarray) -> np.ndarray:
    """For each image a number from 0 on, the same for images that run the same channels."""
    packed = np.packbits(patterns_NC, axis=1)
    if not packed.shape[1]:
        return np.zeros(len(patterns_NC), dtype=np.int64)
    rows = np.ascontiguousarray(packed).view(f"V{packed.shape[1]}").ravel()
    return np.unique(rows, return_inverse=True)[1].ravel()


def pattern_rank(patterns_NC: np.ndarray) -> int:
    """Rank of the matrix of patterns; rows and columns that repeat add nothing to it."""
    rows = patterns_NC[np.unique(route_numbers(patterns_NC), return_index=True)[1]]
    columns = rows[:, np.unique(route_numbers(rows.T), return_index=True)[1]]
    return int(np.linalg.matrix_rank(columns.astype(np.float64))) if columns.size else 0


def similarity(patterns_NC: np.ndarray, labels: np.ndarray) -> tuple[float | None, float | None]:
    """Share of the channels that two images switch alike: of one class, and of different ones.

    Means over all pairs of images. They follow from how many images of a class run a channel, so
    that no pair has to be looked at.
    """
    channels = patterns_NC.shape[1]
    alike, pairs = _agreeing(patterns_NC)
    parts = [_agreeing(patterns_NC[labels == label]) for label in np.unique(labels)]
    alike_within, pairs_within = (sum(column) for column in zip(*parts, strict=True))

    def mean(agreeing: int, of: int) -> float | None:
        return agreeing / (of * channels) if of and channels else None

    return mean(alike_within, pairs_within), mean(alike - alike_within, pairs - pairs_within)


def _agreeing(patterns_NC: np.ndarray) -> tuple[int, int]:
    """Over all pairs of images, the sum of the channels they switch alike; number of pairs."""
    images = len(patterns_NC)
    opened = patterns_NC.sum(axis=0, dtype=np.int64)
    closed = images - opened
    alike = (opened * (opened - 1) + closed * (closed - 1)).sum() // 2
    return int(alike), images * (images - 1) // 2


def _layer(name: str, patterns_NC: np.ndarray, labels: np.ndarray) -> LayerRoutes:
    within, between = similarity(patterns_NC, labels)
    return LayerRoutes(
        name=name,
        channels=patterns_NC.shape[1],
        always=int(patterns_NC.all(axis=0).sum()),
        never=int((~patterns_NC.any(axis=0)).sum()),
        distinct=int(route_numbers(patterns_NC).max()) + 1,
        rank=pattern_rank(patterns_NC),
        within=within,
        between=between,
    )


def _classes(
    names: Sequence[str], labels: np.ndarray, numbers: np.ndarray, patterns_NC: np.ndarray
) -> list[ClassRoutes]:
    found = []
    for label in np.unique(labels):
        counts = np.unique(numbers[labels == label], return_counts=True)[1]
        active = float(patterns_NC[labels == label].mean()) if patterns_NC.size else 0.0
        taken = (int(counts.sum()), len(counts), int(counts.max()))
        found.append(ClassRoutes(names[label], *taken, active))
    return found
