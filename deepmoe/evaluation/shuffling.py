"""Gate shuffling: what a network makes of an image under the gates of an image of another class.

If gates hold something of the class, an image is recognised less often under gates of other
classes, and classes that look alike disturb it least. That is an experiment of the paper.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches, batches_for
from deepmoe.hard_moe import refuse_experts
from deepmoe.model import DeepMoE

DRAWS = 20  # of the paper, for each image
MOST_RUNS = 100_000_000  # of images under gates of others: days on a GPU
LEAST_TOGETHER = 256  # images that run at a time: a class has few in a batch


@dataclass(frozen=True)
class ClassShuffling:
    """How often images of one class are recognised; `None` where there is nothing to measure."""

    name: str
    group: str | None  # the coarse category
    images: int
    own: float | None  # under their own gates
    shuffled: float | None  # under gates of other classes
    followed: float | None  # of these, how often the answer is the class the gates came from
    in_group: float | None  # under gates of classes of the same coarse category
    out_of_group: float | None


@dataclass(frozen=True, eq=False)
class Shuffling:
    """Right answers of the base network under gates of other images.

    Attributes:
        class_names: of the data.
        groups: the coarse category of each class; `None` where the data has none.
        draws: of other gates, for each image.
        seed: of the draws.
        images: of each class, (classes,).
        own_right: of these, how many are recognised under their own gates, (classes,).
        drawn: how often gates of images of one class (column) were given to images of another
            (row), (classes, classes).
        right: of these, how often the image was still recognised.
        followed: of these, how often the answer was the class that the gates came from.
    """

    class_names: tuple[str, ...]
    groups: tuple[str, ...] | None
    draws: int
    seed: int
    images: np.ndarray
    own_right: np.ndarray
    drawn: np.ndarray
    right: np.ndarray
    followed: np.ndarray

    @property
    def accuracy(self) -> np.ndarray:
        """Accuracy of each pair (class of the image, class the gates came from); NaN if none."""
        with np.errstate(invalid="ignore"):
            return self.right / self.drawn

    def of_class(self, name: str) -> ClassShuffling:
        """The figures of one class."""
        if name not in self.class_names:
            raise UserError(f"the data has no class named {name}")
        rows = np.zeros(len(self.class_names), dtype=bool)
        rows[self.class_names.index(name)] = True
        group = None if self.groups is None else self.groups[self.class_names.index(name)]
        return self._of_rows(name, group, rows)

    @property
    def total(self) -> ClassShuffling:
        """The figures of all classes together, each draw counted alike."""
        return self._of_rows("all", None, np.ones(len(self.class_names), dtype=bool))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values; pairs that were never drawn are `None`."""
        classes = [asdict(self.of_class(name)) for name in self.class_names]
        pairs = [[None if np.isnan(a) else float(a) for a in row] for row in self.accuracy]
        settings = {"draws": self.draws, "seed": self.seed}
        return {**settings, "all": asdict(self.total), "classes": classes, "pairs": pairs}

    def _of_rows(self, name: str, group: str | None, rows: np.ndarray) -> ClassShuffling:
        def pooled(counts: np.ndarray, pairs: np.ndarray) -> float | None:
            pairs = pairs & rows[:, None]
            return _share(counts[pairs].sum(), self.drawn[pairs].sum())

        everywhere = np.ones_like(self.drawn, dtype=bool)
        alike = everywhere
        if self.groups is not None:
            of_class = np.array(self.groups)
            alike = of_class[:, None] == of_class[None, :]
        return ClassShuffling(
            name=name,
            group=group,
            images=int(self.images[rows].sum()),
            own=_share(self.own_right[rows].sum(), self.images[rows].sum()),
            shuffled=pooled(self.right, everywhere),
            followed=pooled(self.followed, everywhere),
            in_group=None if self.groups is None else pooled(self.right, alike),
            out_of_group=None if self.groups is None else pooled(self.right, ~alike),
        )


@torch.no_grad()
def shuffle_gates(
    model: DeepMoE,
    batches: Batches,
    class_names: Sequence[str],
    *,
    groups: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    only: str | None = None,
    most: int | None = None,
) -> Shuffling:
    """Runs the base network on images under gates of random images of other classes.

    An image meets the other classes in random order, one after the other, and a random image of
    each. So `draws = 20 * (classes - 1)` gives it exactly 20 of every other class. Exits are left
    aside: the base network answers.

    Args:
        model: gated.
        batches: labelled images that can be gone through twice, such as a `BatchLoader`.
        class_names: of the data.
        groups: the coarse category of each class, such as `coarse_groups` gives.
        draws: for each image.
        seed: of the draws.
        only: shuffle the images of this class alone; gates still come from all others.
        most: how many images of each class to shuffle; all of them if not given.

    Raises:
        UserError: for a model without gates, for images without another class, or without the
            one that is asked for, among them, and for more draws than anybody waits for.
    """
    _check_asked(model, draws, seed, most)
    names = tuple(class_names)
    if groups is not None and len(groups) != len(names):
        raise UserError(f"there are {len(names)} classes, and {len(groups)} groups for them")
    if only is not None and only not in names:
        raise UserError(f"the data has no class named {only}")
    bank_NC, labels, right = _bank(model, batches)
    if len(np.unique(labels)) < 2:
        raise UserError("all images are of one class: there are no gates of another to give them")
    if labels.max() >= len(names):
        raise UserError(f"there are {len(names)} names of classes, and a label {labels.max()}")
    chosen = _chosen(labels, None if only is None else names.index(only), most)
    if not chosen.any():
        raise UserError(f"none of these {len(labels):,} images is of the class {only}: take more")
    if chosen.sum() * draws > MOST_RUNS:
        raise UserError(
            f"{chosen.sum():,} images with {draws:,} draws each are too many, the most is "
            f"{MOST_RUNS:,} in all: take fewer draws or images"
        )
    drawn, hits, followed = np.zeros((3, len(names), len(names)), dtype=np.int64)
    donors = _donors(labels, chosen, draws, seed)
    for image, donor, answers in _runs(model, batches, bank_NC, chosen, donors):
        pair = labels[image], labels[donor]
        np.add.at(drawn, pair, 1)
        np.add.at(hits, pair, answers == labels[image])
        np.add.at(followed, pair, answers == labels[donor])
    return Shuffling(
        class_names=names,
        groups=None if groups is None else tuple(groups),
        draws=draws,
        seed=seed,
        images=np.bincount(labels[chosen], minlength=len(names)),
        own_right=np.bincount(labels[chosen & right], minlength=len(names)),
        drawn=drawn,
        right=hits,
        followed=followed,
    )


def _check_asked(model: DeepMoE, draws: int, seed: int, most: int | None) -> None:
    """Refuses what no data could be shuffled by."""
    refuse_experts(model, "it has no gates to shuffle")
    if not model.gated:
        raise UserError("a network without gates has none to shuffle")
    if draws < 1 or (most is not None and most < 1):
        raise UserError("shuffling takes at least one draw an image, and one image a class")
    if seed < 0:
        raise UserError(f"a seed is a whole number from 0 on, not {seed}")


def _bank(model: DeepMoE, batches: Batches) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Gates of all images side by side, their labels, and which of them the network knows."""
    gates, labels, right = [], [], []
    for x_BCHW, of_batch in batches_for(model, batches):
        if of_batch.dim() != 1:
            raise UserError("gates are shuffled between classes, and these images have no class")
        own = model(x_BCHW).gates if model.on_the_way else model.route(x_BCHW)[0]
        assert own is not None
        g_BC = torch.cat(own, dim=1).float().cpu()
        gates.append(g_BC)
        labels.append(of_batch.cpu().numpy())
        right.append(_answers(model, x_BCHW, g_BC) == labels[-1])
    return torch.cat(gates), np.concatenate(labels), np.concatenate(right)


def _runs(
    model: DeepMoE,
    batches: Batches,
    bank_NC: Tensor,
    chosen: np.ndarray,
    donors: np.ndarray,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """All draws, many at a time: which images, whose gates they got, and the answers."""
    start, used = 0, 0
    for x_BCHW, _ in batches_for(model, batches):
        rows = np.flatnonzero(chosen[start : start + len(x_BCHW)])
        given = donors[used : used + len(rows)]
        images, together = np.repeat(rows, given.shape[1]), max(LEAST_TOGETHER, len(x_BCHW))
        for first in range(0, len(images), together):
            part = slice(first, first + together)
            x = x_BCHW[torch.from_numpy(images[part]).to(x_BCHW.device)]
            image, donor = start + images[part], given.ravel()[part]
            yield image, donor, _answers(model, x, bank_NC[donor])
        start, used = start + len(x_BCHW), used + len(rows)


def _answers(model: DeepMoE, x_BCHW: Tensor, g_BC: Tensor) -> np.ndarray:
    gates = g_BC.to(x_BCHW).split(model.gating.widths, dim=1)
    return model.gating(model.network, x_BCHW, gates).argmax(dim=1).cpu().numpy()


def _chosen(labels: np.ndarray, only: int | None, most: int | None) -> np.ndarray:
    """Which images are shuffled: of each class, or of one, the first so many."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels) if only is None else [only]:
        chosen[np.flatnonzero(labels == label)[:most]] = True
    return chosen


def _donors(labels: np.ndarray, chosen: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """For each chosen image, the images whose gates it gets; (chosen images, draws)."""
    rng = np.random.default_rng(seed)
    by_class = np.argsort(labels, kind="stable")  # images of a class lie side by side
    counts = np.bincount(labels)
    first = np.cumsum(counts) - counts
    there = np.flatnonzero(counts)
    donors = np.zeros((int(chosen.sum()), draws), dtype=np.int64)
    for place, image in enumerate(np.flatnonzero(chosen)):
        others = there[there != labels[image]]
        rounds = np.tile(others, (-(-draws // len(others)), 1))
        met = rng.permuted(rounds, axis=1).ravel()[:draws]
        donors[place] = by_class[first[met] + rng.integers(counts[met])]
    return donors


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
