"""What a trained model must know of its data."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Task = Literal["classification", "segmentation"]


@dataclass(frozen=True)
class DataInfo:
    """What a model must know of its data to judge an image: goes into checkpoints."""

    class_names: tuple[str, ...]
    size: tuple[int, int]  # height and width that a model is trained for
    mean: tuple[float, ...]  # of each colour, in 0..1, over the training images
    std: tuple[float, ...]
    task: Task = "classification"

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """uint8 images to float32 of zero mean and unit variance."""
        mean = torch.tensor(self.mean).mul(255)[:, None, None]
        std = torch.tensor(self.std).mul(255)[:, None, None]
        device = images_BCHW.device
        if device.type == "cuda":  # without waiting for the copy
            mean, std = (t.pin_memory().to(device, non_blocking=True) for t in (mean, std))
        return (images_BCHW.float() - mean) / std
