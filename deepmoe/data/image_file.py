"""A single image file, for prediction."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepmoe.errors import UserError


def read_image(path: str | Path, size: tuple[int, int]) -> Tensor:
    """Reads an image as uint8 CHW: three colours, resized to (height, width)."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((size[1], size[0]), Image.Resampling.BILINEAR)
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image") from error
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read image {path}: {reason}") from error
    return torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1)
