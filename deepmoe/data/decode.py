"""Image files to RGB, whatever they hold: one decoding, one resize."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmoe.data.workers import Unreadable

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""

# By content, not by name: ImageNet has a PNG that is named .JPEG. Only these, because others of
# Pillow's decoders start programs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
MODES_OF_ONE_NUMBER = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")


def decode_box(
    content: bytes, choose: Callable[[int, int], Box], size: int, *, shrink: bool
) -> Tensor:
    """Decodes a part of an image, resized to a square, as uint8 image_CHW of red, green and blue.

    Args:
        content: the file.
        choose: gives the part for the image's width and height.
        size: pixels a side of the result.
        shrink: lets the JPEG decoder itself scale by 1/2, 1/4 or 1/8 where the part stays at least
            as large as the result: much faster for big photos, but not equal to the bit.

    Raises:
        Unreadable: where the file is empty, truncated, too large or no image.
    """
    from PIL import Image

    if not content:
        raise Unreadable("empty file")
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            box = choose(image.width, image.height)
            if shrink:
                box = _shrink(image, box, size)
            part = to_rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
    except Unreadable:
        raise
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise Unreadable(_reason(error)) from error
    return torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()


def to_rgb(image: Any) -> Any:
    """A Pillow image of any mode as RGB; EXIF rotation is ignored, as ImageNet's users do.

    Transparency is dropped, not blended with a background: what torchvision's and timm's loaders
    do, so that published weights see what they were trained on.
    """
    if image.mode == "RGB":
        return image
    if image.mode in MODES_OF_ONE_NUMBER:
        return _to_8_bit(image).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, Pillow warns
    return image.convert("RGB")


def _to_8_bit(image: Any) -> Any:
    """Scales grey values to 0..255; Pillow's own conversion would clip nearly all of them."""
    from PIL import Image

    values = np.asarray(image).astype(np.float64)
    low, high = values.min(), values.max()
    if not np.isfinite(low + high):
        raise Unreadable("its values are not finite")
    # The files don't say what white is: the smallest usual range that holds every value.
    usual = (1, 255, 65535) if image.mode == "F" else (65535,)
    top = next((top for top in usual if high <= top), None)
    if low < 0 or top is None:
        values, top = values - low, high - low
    return Image.fromarray(np.rint(values * (255 / max(top, 1e-300))).astype(np.uint8))


def _shrink(image: Any, box: Box, size: int) -> Box:
    """Sets the decoder's own scaling, and returns the box in the smaller image."""
    left, top, right, bottom = box
    scale = next((s for s in (8, 4, 2) if min(right - left, bottom - top) >= s * size), 1)
    drafted = image.draft(None, (image.width // scale, image.height // scale))
    if drafted is None:  # not a JPEG
        return box
    return left / scale, top / scale, right / scale, bottom / scale


def _reason(error: Exception) -> str:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels"
    text = str(error).partition("\n")[0][:100]
    return text or type(error).__name__
