"""The paper's data sets: what a user has to give, and where it is looked for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A data set of the paper.

    Attributes:
        key: in the names of runs, and of presets.
        kind: which schedule goes with it.
        title: for people.
        layout: what a user has to give.
        folders: below `data.root`, where it is looked for before `data.root` itself.
        names: that `data.name` may have.
        classes: of the data set.
        size: of the images that networks see.
    """

    key: str
    kind: str
    title: str
    layout: str
    folders: tuple[str, ...]
    names: tuple[str, ...]
    classes: int
    size: tuple[int, int]

    def place(self, root: str) -> str:
        """Where it is, below a root or there itself."""
        found = [path for name in self.folders if (path := Path(root, name)).exists()]
        return str(found[0]) if found else root

    def looked_for(self, root: str) -> str:
        """The places in words."""
        if Path(root).is_file():
            return root
        places = ", ".join(str(Path(root, name)) for name in self.folders)
        return f"{places} and {root or Path()} itself"


_ARCHIVE = "its published archive, unpacked (the python or the binary one)"
SOURCES = {
    source.key: source
    for source in (
        Source("cifar10", "cifar", "CIFAR-10", _ARCHIVE, ("cifar10",), ("cifar10",), 10, (32, 32)),
        Source(
            "cifar100", "cifar", "CIFAR-100", _ARCHIVE, ("cifar100",), ("cifar100",), 100, (32, 32)
        ),
        Source(
            "imagenet",
            "imagenet",
            "ImageNet",
            "a folder or zip with train/CLASS/ and val/CLASS/ (a part of it such as Imagenette "
            "will do)",
            ("imagenet", "imagenet.zip"),
            ("image-folder",),
            1000,
            (224, 224),
        ),
        Source(
            "cityscapes",
            "segmentation",
            "Cityscapes, or CamVid in its place",
            "Cityscapes with leftImg8bit/ and gtFine/ (data.name = cityscapes), or pairs of "
            "images/SPLIT/NAME.jpg and labels/SPLIT/NAME.png as a folder or zip "
            "(data.name = segmentation-pairs)",
            ("cityscapes", "camvid", "camvid.zip"),
            ("cityscapes", "segmentation-pairs"),
            19,
            (832, 832),
        ),
    )
}
