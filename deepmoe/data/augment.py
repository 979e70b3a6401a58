"""Augmentation of whole batches by tensor operations, on whatever device they are on."""

import torch
import torch.nn.functional as F
from torch import Tensor


def random_crop(images_BCHW: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pads with black on all sides and cuts each image out at its own random place."""
    if not padding:
        return images_BCHW
    count, _, height, width = images_BCHW.shape
    device = images_BCHW.device
    padded = F.pad(images_BCHW, (padding,) * 4)
    top, left = torch.randint(
        2 * padding + 1, (2, count, 1), generator=generator, device=device
    ).unbind()
    rows = (top + torch.arange(height, device=device))[:, :, None]
    columns = (left + torch.arange(width, device=device))[:, None, :]
    image = torch.arange(count, device=device)[:, None, None]
    return padded[image, :, rows, columns].permute(0, 3, 1, 2)  # indexing puts channels last


def random_mirror(images_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Flips each image left to right with probability one half."""
    shape = (len(images_BCHW), 1, 1, 1)
    flip = torch.rand(shape, generator=generator, device=images_BCHW.device) < 0.5
    return torch.where(flip, images_BCHW.flip(3), images_BCHW)
