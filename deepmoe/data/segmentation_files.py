"""Where segmentation data sets keep images and label maps, and which classes these name."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from deepmoe.data.files import FileTree
from deepmoe.data.workers import Unreadable
from deepmoe.errors import UserError

VOID = 255
"""The label of pixels that do not count."""


class Pair(NamedTuple):
    """An image file and the label map that goes with it."""

    image: str
    label: str


@dataclass(frozen=True)
class Layout:
    """How the files of a data set are named: FOLDER/SPLIT/STEM+ENDING."""

    images: str
    labels: str
    image_endings: tuple[str, ...]
    label_ending: str
    evaluation: tuple[str, ...]  # the first of these splits that is there
    # Label ids in the files, in the order of the classes; None: an id is its class.
    ids: tuple[int, ...] | None = None
    class_names: tuple[str, ...] | None = None  # None: the files say

    def table(self) -> np.ndarray:
        """The class of each id in the files."""
        if self.ids is None:
            return np.arange(256, dtype=np.uint8)
        table = np.full(256, VOID, dtype=np.uint8)
        table[list(self.ids)] = np.arange(len(self.ids))
        return table


# fmt: off
LAYOUTS = {
    "segmentation-pairs": Layout(
        "images", "labels", (".jpg", ".jpeg", ".png"), ".png", evaluation=("test", "val")
    ),
    "cityscapes": Layout(
        "leftImg8bit", "gtFine", ("_leftImg8bit.png",), "_gtFine_labelIds.png",
        evaluation=("val",),  # the test split's labels are kept secret
        ids=(7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33),
        class_names=(
            "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light",
            "traffic sign", "vegetation", "terrain", "sky", "person", "rider", "car", "truck",
            "bus", "train", "motorcycle", "bicycle",
        ),
    ),
}
# fmt: on


@dataclass(frozen=True)
class PairedFiles:
    """The pairs of a data set by split."""

    tree: FileTree
    layout: Layout
    names: tuple[str, ...]

    @classmethod
    def open(cls, root: str, layout: Layout) -> "PairedFiles":
        """Lists a folder or zip, which may hold everything in one outer folder."""
        tree = FileTree.open(root, layout.images, layout.labels)
        if layout.images not in tree.folders():
            raise UserError(f"{root} has no folder {layout.images}/SPLIT with images")
        return cls(tree, layout, tuple(tree.names()))

    def pairs(self, split: str) -> list[Pair]:
        """The pairs of a split, sorted; none where there is no such split.

        Raises:
            UserError: where an image has no label map, or a label map no image.
        """
        images = self._by_stem(self.layout.images, split, self.layout.image_endings)
        labels = self._by_stem(self.layout.labels, split, (self.layout.label_ending,))
        for stem in sorted(images.keys() ^ labels.keys()):
            there, missing = (images, "label map") if stem in images else (labels, "image")
            raise UserError(f"{there[stem]} in {self.tree.root} has no {missing} of the same name")
        return [Pair(image, labels[stem]) for stem, image in sorted(images.items())]

    def class_names(self, train: Sequence[Pair]) -> tuple[str, ...]:
        """The layout's names, those of classes.txt, or numbers up to the largest label id."""
        if self.layout.class_names is not None:
            return self.layout.class_names
        file = "classes.txt"
        if file in self.names:
            lines = self.tree.read(file).decode("utf-8", errors="replace").splitlines()
            names = tuple(line.strip() for line in lines if line.strip())
            if not names or len(set(names)) < len(names):
                raise UserError(f"{file} in {self.tree.root} must name each class on its own line")
            return names
        largest = max((self._largest_id(pair) for pair in train), default=-1)
        if largest < 0:
            raise UserError(f"no training label map in {self.tree.root} holds a label id")
        return tuple(f"class {label}" for label in range(largest + 1))

    def sizes(self, pairs: Iterable[Pair]) -> set[tuple[int, int]]:
        """Heights and widths that occur among the readable label maps; quick: headers only."""
        found = set()
        for pair in pairs:
            try:
                with _decoding("label map"):
                    image = _open_image(self.tree, pair.label)
            except Unreadable:
                continue  # the loader skips and counts it
            found.add((image.height, image.width))
        return found

    def _by_stem(self, folder: str, split: str, endings: tuple[str, ...]) -> dict[str, str]:
        start = f"{folder}/{split}/"
        return {
            name[len(start) : -len(ending)]: name
            for name in self.names
            for ending in endings
            if name.startswith(start) and name.lower().endswith(ending.lower())
        }

    def _largest_id(self, pair: Pair) -> int:
        try:
            ids = read_ids(self.tree, pair.label)
        except Unreadable:
            return -1  # the loader skips and counts it
        return int(ids[ids != VOID].max()) if (ids != VOID).any() else -1


def read_colours(tree: FileTree, name: str) -> np.ndarray:
    """An image, uint8 HWC in three colours."""
    with _decoding("image"):
        return np.asarray(_open_image(tree, name).convert("RGB"))


def read_ids(tree: FileTree, name: str) -> np.ndarray:
    """The ids of a label map as they are in the file, uint8 HW."""
    with _decoding("label map"):
        image = _open_image(tree, name)
        if image.mode not in ("L", "P", "1"):
            raise Unreadable(f"label map has pixels of mode {image.mode}, not ids of 8 bits")
        return np.asarray(image).astype(np.uint8, copy=False)


def _open_image(tree: FileTree, name: str) -> Image.Image:
    return Image.open(io.BytesIO(tree.read(name)))  # decodes no pixels yet


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    try:
        yield
    except Unreadable:
        raise
    except UnidentifiedImageError as error:  # whose message names an address in memory
        raise Unreadable(f"{what} is not an image file") from error
    except Exception as error:  # damaged files make zip and decoders raise almost anything
        raise Unreadable(f"{what} is damaged ({error})") from error
