"""Where segmentation data sets keep images and label maps, and which classes these name."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from deepmoe.data.decode import open_image, to_rgb
from deepmoe.data.file_tree import FileTree
from deepmoe.data.reading import Unreadable
from deepmoe.errors import UserError

CLASSES_FILE = "classes.txt"
MOST_BYTES_OF_CLASSES = 2**16
VOID = 255
"""The label of pixels that do not count."""


class Pair(NamedTuple):
    """An image file and the label map that goes with it."""

    image: str
    label: str


@dataclass(frozen=True)
class PairLayout:
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
    "segmentation-pairs": PairLayout(
        "images", "labels", (".jpg", ".jpeg", ".png"), ".png", evaluation=("test", "val")
    ),
    "cityscapes": PairLayout(
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
    layout: PairLayout

    @classmethod
    def open(cls, root: str, layout: PairLayout) -> "PairedFiles":
        """Opens a folder or zip, which may hold everything in one outer folder."""
        tree = FileTree.open(root, layout.images, layout.labels)
        if layout.images not in tree.folders():
            raise UserError(f"{root} has no folder {layout.images}/SPLIT with images")
        return cls(tree, layout)

    def pairs(self, split: str) -> list[Pair]:
        """The pairs of a split, sorted; none where there is no such split.

        Raises:
            UserError: where an image has no label map, or a label map no image, or one has two.
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
        if self.tree.has(CLASSES_FILE):
            return self._named_classes()
        largest = max((self._largest_class(pair) for pair in train), default=-1)
        return tuple(f"class {label}" for label in range(largest + 1))

    def sizes(self, pairs: Iterable[Pair]) -> set[tuple[int, int]]:
        """Heights and widths that occur among the readable label maps; no pixels are decoded."""
        found = set()
        for pair in pairs:
            try:
                with _open(self.tree, pair.label, "label map") as image:
                    found.add((image.height, image.width))
            except Unreadable:
                continue  # the loader skips and counts it
        return found

    def check_labels(self, pairs: Sequence[Pair]) -> None:
        """Refuses pairs of which nothing can be learnt or judged; quick, where the first will do.

        Raises:
            UserError: where no label map holds a pixel of any class.
        """
        if not any(self._largest_class(pair) >= 0 for pair in pairs):
            try:
                read_ids(self.tree, pairs[0].label)
                reason = "all pixels are void"
            except Unreadable as error:
                reason = str(error)
            raise UserError(
                f"no label map like {pairs[0].label} in {self.tree.root} holds a class: {reason}"
            )

    def _named_classes(self) -> tuple[str, ...]:
        try:
            text = self.tree.read(CLASSES_FILE, MOST_BYTES_OF_CLASSES).decode("utf-8-sig")
        except (Unreadable, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {CLASSES_FILE} in {self.tree.root}: {error}") from error
        names = tuple(line.strip() for line in text.splitlines() if line.strip())
        if not 0 < len(set(names)) == len(names) <= VOID:
            raise UserError(
                f"{CLASSES_FILE} in {self.tree.root} must name each class on its own line, "
                f"and no more than {VOID}"
            )
        return names

    def _by_stem(self, folder: str, split: str, endings: tuple[str, ...]) -> dict[str, str]:
        start = f"{folder}/{split}"
        found: dict[str, str] = {}
        for name in self.tree.names(start):
            ending = next((e for e in endings if name.lower().endswith(e.lower())), None)
            if ending is None:
                continue
            stem = name[len(start) + 1 : -len(ending)]
            if stem in found:
                raise UserError(
                    f"{found[stem]} and {name} in {self.tree.root} have the same name, "
                    "so their label maps would, too: remove one"
                )
            found[stem] = name
        return found

    def _largest_class(self, pair: Pair) -> int:
        try:
            classes = self.layout.table()[read_ids(self.tree, pair.label)]
        except Unreadable:
            return -1  # the loader skips and counts it
        inside = classes[classes != VOID]
        return int(inside.max()) if inside.size else -1


def read_colours(tree: FileTree, name: str) -> np.ndarray:
    """An image, uint8 HWC in three colours."""
    with _open(tree, name, "image") as image:
        return np.asarray(to_rgb(image))


def read_ids(tree: FileTree, name: str) -> np.ndarray:
    """The ids of a label map as they are in the file, uint8 HW."""
    with _open(tree, name, "label map") as image:
        if image.format != "PNG":
            raise Unreadable(f"{image.format} instead of PNG, so ids may not be as they were saved")
        if image.mode not in ("L", "P", "1"):
            raise Unreadable(f"pixels of mode {image.mode}, not ids of 8 bits")
        # Pillow spreads grey of 2 or 4 bits over 0..255.
        spread = {"L;2": 85, "L;4": 17}.get(image.tile[0].args, 1)
        return np.asarray(image).astype(np.uint8, copy=False) // spread


@contextmanager
def _open(tree: FileTree, name: str, what: str) -> Iterator[Any]:
    try:
        with open_image(tree.read(name)) as image:
            yield image
    except Unreadable as error:
        raise Unreadable(f"{what}: {error}") from error
