"""What a trained model must know of its data."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from deepmoe.errors import UserError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MOST_PIXELS = 2**27  # of an image
Task = Literal["classification", "segmentation"]


@dataclass(frozen=True)
class DataInfo:
    """What a model must know of its data to judge an image: goes into checkpoints."""

    class_names: tuple[str, ...]
    size: tuple[int, int]  # height and width that a model is trained for
    mean: tuple[float, ...]  # of each colour, in 0..1, over the training images
    std: tuple[float, ...]
    task: Task = "classification"

    def __post_init__(self) -> None:
        colours = (*self.mean, *self.std)
        if len(self.mean) != 3 or len(self.std) != 3 or not all(map(math.isfinite, colours)):
            raise UserError("mean and std hold three finite numbers each")
        if min(self.std) <= 0 or min(self.size) < 1:
            raise UserError("std and size are above 0")
        if self.size[0] * self.size[1] > MOST_PIXELS:
            raise UserError(f"images have at most {MOST_PIXELS:,} pixels")
        if not 2 <= len(set(self.class_names)) == len(self.class_names):
            raise UserError("there are at least two classes, each with a name of its own")

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """uint8 images to float32 of zero mean and unit variance."""
        mean = _colour(self.mean, images_BCHW.device)
        std = _colour(self.std, images_BCHW.device)
        return images_BCHW.float().sub(mean).div_(std)

    def to_pixels(self, images_BCHW: Tensor) -> Tensor:
        """Normalised images to uint8, as they were before."""
        mean = _colour(self.mean, images_BCHW.device)
        std = _colour(self.std, images_BCHW.device)
        return images_BCHW.float().mul(std).add_(mean).round_().clamp_(0, 255).to(torch.uint8)


@cache  # copying them anew for every batch would wait for the device
@torch.inference_mode(False)  # whoever asks first, training may use them
def _colour(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).mul(255)[:, None, None]
