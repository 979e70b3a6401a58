"""scikit-learn's handwritten digits: real images that need no download."""

import torch
import torch.nn.functional as F

from deepmoe.data.split import Split
from deepmoe.errors import UserError
from deepmoe.extras import require

DIGITS_SIZE = 16


def read_digits(size: int = DIGITS_SIZE) -> tuple[Split, Split, tuple[str, ...]]:
    """1,437 training and 360 test images of 10 classes, scaled up from 8x8 to three equal colours.

    Args:
        size: pixels a side, 8 to 32.

    Returns:
        Training split, test split and class names.
    """
    require("train", "sklearn")
    # Both imports are slow, and needed here only.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    if not 8 <= size <= 32:
        raise UserError(f"digits come at 8 to 32 px a side, not {size}")
    images, labels = load_digits(return_X_y=True)
    small = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) * (255 / 16)
    scaled = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
    pixels = scaled.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    whole = Split(pixels, torch.from_numpy(labels).long())
    train, test = train_test_split(
        torch.arange(len(whole)), test_size=0.2, stratify=labels, random_state=0
    )
    return whole[train], whole[test], tuple(str(digit) for digit in range(10))
