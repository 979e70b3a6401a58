"""Augmentation of whole batches by tensor operations, on whatever device they are on."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Views:
    """How each image of a batch is looked at; `None` where all are alike."""

    corners: Tensor | None  # (2, images): where the crop begins, in the padded image
    flips: Tensor | None  # (images,): whether it is mirrored

    def of(self, chosen: Tensor) -> "Views":
        """The views of some of the images."""
        corners = None if self.corners is None else self.corners[:, chosen]
        return Views(corners, None if self.flips is None else self.flips[chosen])


def random_views(count: int, padding: int, mirror: bool, generator: torch.Generator) -> Views:
    """Draws a place for each image to be cut out at, and whether it is mirrored."""
    draw: dict[str, Any] = {"generator": generator, "device": generator.device}
    corners = torch.randint(2 * padding + 1, (2, count), **draw) if padding else None
    return Views(corners, torch.rand(count, **draw) < 0.5 if mirror else None)


def look_at(images_BCHW: Tensor, views: Views, padding: int) -> Tensor:
    """Pads images with black on all sides, and shows each one in its view."""
    if views.corners is not None:
        count, _, height, width = images_BCHW.shape
        device = images_BCHW.device
        padded = F.pad(images_BCHW, (padding,) * 4)
        top, left = views.corners[:, :, None].unbind()
        rows = (top + torch.arange(height, device=device))[:, :, None]
        columns = (left + torch.arange(width, device=device))[:, None, :]
        image = torch.arange(count, device=device)[:, None, None]
        # Indexing puts channels last.
        images_BCHW = padded[image, :, rows, columns].permute(0, 3, 1, 2)
    if views.flips is not None:
        flips = views.flips[:, None, None, None]
        images_BCHW = torch.where(flips, images_BCHW.flip(3), images_BCHW)
    return images_BCHW
