"""Prediction for the pixels of image files, as numbers and as pictures."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepmoe.checkpoint import Checkpoint
from deepmoe.costs import dense_macs, format_macs
from deepmoe.data.decode import read_whole_image
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import size_of, summed_costs
from deepmoe.figures import empty_figure
from deepmoe.timing import timed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

GOLDEN = 0.618034  # of a turn: hues that follow each other lie far apart
OPACITY = 0.5  # of the colours in an overlay
SQUARE, MARGIN = 16, 6  # pixels, of a legend


@dataclass(frozen=True)
class SegmentationPrediction:
    """The class of each pixel of an image, and what it cost to say so.

    Attributes:
        image: the file.
        top: the classes that cover most of it, and their shares of the pixels.
        macs: that ran, embedding and gates included.
        dense_macs: of the base network with all channels.
        active: share of the gated channels that ran.
        ms: milliseconds in the model.
        class_names: of all classes.
        labels_HW: the class of each pixel.
        pixels_HWC: the image.
    """

    image: str
    top: tuple[tuple[str, float], ...]
    macs: int
    dense_macs: int
    active: float
    ms: float
    class_names: tuple[str, ...] = field(repr=False)
    labels_HW: np.ndarray = field(repr=False, compare=False)
    pixels_HWC: np.ndarray = field(repr=False, compare=False)

    def __str__(self) -> str:
        classes = ", ".join(f"{label} {share:.1%}" for label, share in self.top)
        cost = f"{format_macs(self.macs)} MACs ({self.macs / self.dense_macs:.1%} of dense)"
        return f"{self.image}: {classes} of the pixels; {cost}, {self.ms:.1f} ms"

    def as_dict(self) -> dict[str, Any]:
        """Everything but the pixels, as plain values."""
        return {
            "image": self.image,
            "top": [{"label": label, "share": share} for label, share in self.top],
            "size": list(self.labels_HW.shape),
            "macs": self.macs,
            "dense_macs": self.dense_macs,
            "active": self.active,
            "ms": self.ms,
        }

    def coloured(self) -> "Image":
        """The classes as a picture: its values are their numbers, its palette their colours."""
        from PIL import Image

        picture = Image.fromarray(self.labels_HW.astype(np.uint8), mode="P")
        picture.putpalette(palette(len(self.class_names)).flatten().tolist())
        return picture

    def overlay(self) -> "Image":
        """The image under the colours of its classes."""
        from PIL import Image

        colours_HWC = palette(len(self.class_names))[self.labels_HW]
        mixed = OPACITY * colours_HWC + (1 - OPACITY) * self.pixels_HWC
        return Image.fromarray(np.rint(mixed).astype(np.uint8))

    def plot(self) -> "Figure":
        """The overlay, with the names of the classes."""
        from matplotlib.patches import Patch

        figure = empty_figure((8, 5))
        axes = figure.subplots()
        axes.imshow(np.asarray(self.overlay()))
        axes.set_axis_off()
        axes.set_title(self.image, fontsize=9, parse_math=False)
        colours = palette(len(self.class_names)) / 255
        shown = np.unique(self.labels_HW).tolist()
        patches = [Patch(color=colours[i], label=self.class_names[i]) for i in shown]
        figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8)
        return figure


@torch.inference_mode()
def segment(checkpoint: Checkpoint, path: str | Path, top: int) -> SegmentationPrediction:
    """Judges every pixel of an image, whole and in its own size."""
    model, info = checkpoint.model, checkpoint.info
    image_CHW = read_whole_image(path)
    x_BCHW = model.as_input(info.normalise(image_CHW[None]))
    try:
        output, seconds = timed(partial(model, x_BCHW), x_BCHW.device)
    except RuntimeError as error:
        if "memory" in str(error):
            raise UserError(f"there is not enough memory for {path}") from error
        height, width = size_of(x_BCHW)
        raise UserError(f"the model can't run {path}: {height}x{width} px don't fit it") from error
    if not bool(output.logits.isfinite().all()):
        raise UserError(f"the model's outputs for {path} are not finite")
    labels_HW = output.logits.argmax(dim=1)[0].cpu()
    macs, active = summed_costs(model, size_of(x_BCHW), output)
    return SegmentationPrediction(
        image=str(path),
        top=_largest(labels_HW, info.class_names, top),
        macs=int(macs),
        dense_macs=dense_macs(model, size_of(x_BCHW)),
        active=float(active),
        ms=1e3 * seconds,
        class_names=info.class_names,
        labels_HW=labels_HW.numpy(),
        pixels_HWC=image_CHW.permute(1, 2, 0).numpy(),
    )


def palette(classes: int) -> np.ndarray:
    """A colour for each class, red, green and blue from 0 to 255; those of neighbours differ."""
    shades = ((0.85, 0.95), (0.6, 0.75), (0.95, 0.6))
    colours = [colorsys.hsv_to_rgb(i * GOLDEN % 1, *shades[i % 3]) for i in range(classes)]
    return np.rint(255 * np.array(colours)).astype(np.uint8)


def legend(class_names: Sequence[str]) -> "Image":
    """The colour and the name of each class, as a picture."""
    from PIL import Image, ImageDraw

    step = SQUARE + MARGIN
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    names = [name if name.isprintable() else ascii(name) for name in class_names]
    widest = max(draw.textlength(_drawable(name)) for name in names)
    size = int(widest) + step + 2 * MARGIN, step * len(names) + MARGIN
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for number, (name, colour) in enumerate(zip(names, palette(len(names)), strict=True)):
        top = MARGIN + step * number
        draw.rectangle((MARGIN, top, MARGIN + SQUARE - 1, top + SQUARE - 1), fill=tuple(colour))
        draw.text((MARGIN + step, top + 2), _drawable(name), fill="black")
    return picture


def _drawable(name: str) -> str:
    """What Pillow's own font can draw."""
    return name.encode("latin-1", "replace").decode("latin-1")


def _largest(
    labels_HW: Tensor, class_names: Sequence[str], top: int
) -> tuple[tuple[str, float], ...]:
    counts = torch.bincount(labels_HW.flatten(), minlength=len(class_names))
    values, indices = counts.topk(min(top, len(class_names)))
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    return tuple((class_names[i], count / labels_HW.numel()) for i, count in pairs if count)
