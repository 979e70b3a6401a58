"""Image files to RGB, whatever they hold: one opener, one decoding, one resize."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.reading import Unreadable, read_file, reason
from deepmoe.errors import UserError

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""

# By content, not by name: ImageNet has a PNG that is named .JPEG. Only these, because others of
# Pillow's decoders start programs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
MODES_OF_ONE_NUMBER = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
MOST_PIXELS = 2**27
MOST_SCANNED_PIXELS = 2**33  # of a JPEG: a few bytes make a decoder go over all pixels once more
DEFAULT_SIZE = 224  # the one that data.resize is meant for


@contextmanager
def open_image(content: bytes) -> Iterator[Any]:
    """A file as a Pillow image, not decoded yet; what goes wrong while it is open is `Unreadable`.

    Raises:
        Unreadable: where the file is empty, truncated, too large or no image.
    """
    from PIL import Image

    if not content:
        raise Unreadable("empty file")
    try:
        # Pillow warns of sizes below our own limit, and of metadata that plays no part here.
        with (
            warnings.catch_warnings(action="ignore"),
            Image.open(BytesIO(content), formats=FORMATS) as image,
        ):
            _check_size(image, content)
            yield image
    except Unreadable:
        raise
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise Unreadable(_reason(error)) from error


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

    with open_image(content) as image:
        box = choose(image.width, image.height)
        if shrink:
            box = _shrink(image, box, size)
        part = to_rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()


def read_image(path: str | Path, size: int, config: DataConfig) -> Tensor:
    """Reads an image file as the evaluation of a data set would, as uint8 image_CHW.

    Args:
        path: of the file.
        size: pixels a side of the result.
        config: of the data set: images of a folder are cut at the centre, others taken whole.

    Raises:
        UserError: where the file can't be used.
    """
    choose = evaluation_box(config, size) if config.name == "image-folder" else _whole
    try:
        return decode_box(read_file(path), choose, size, shrink=False)
    except Unreadable as error:
        raise UserError(f"cannot read image {path}: {error}") from error


def read_whole_image(path: str | Path) -> Tensor:
    """Reads an image file in its own size, as uint8 image_CHW.

    Raises:
        UserError: where the file can't be used.
    """
    try:
        with open_image(read_file(path)) as image:
            pixels_HWC = np.array(to_rgb(image))
    except Unreadable as error:
        raise UserError(f"cannot read image {path}: {error}") from error
    return torch.from_numpy(pixels_HWC).permute(2, 0, 1).contiguous()


def evaluation_box(config: DataConfig, size: int) -> Callable[[int, int], Box]:
    """What evaluation takes of an image, by its width and height."""
    return partial(centre_box, round(config.resize * size / DEFAULT_SIZE), size)


def centre_box(resize: int, size: int, width: int, height: int) -> Box:
    """The part that is left of an image whose shorter side is resized, then cut at the centre.

    Rounded as by torchvision's Resize(resize) and CenterCrop(size), but in the image's own pixels,
    so that one resize of this part does both.
    """
    shorter = min(width, height)
    resized = (int(resize * width / shorter), int(resize * height / shorter))
    left, top = (round((side - size) / 2) for side in resized)
    x, y = width / resized[0], height / resized[1]
    return left * x, top * y, min((left + size) * x, width), min((top + size) * y, height)


def random_box(rng: np.random.Generator, min_area: float, width: int, height: int) -> Box:
    """A random part of an image: torchvision's RandomResizedCrop, to the letter.

    The share of the area is uniform in `min_area`..1, the logarithm of width / height in that of
    3/4..4/3. Where ten tries don't fit the image: its centre, as large as these ratios let it be.
    """
    narrowest, widest = 3 / 4, 4 / 3
    for _ in range(10):
        area = width * height * rng.uniform(min_area, 1)
        ratio = math.exp(rng.uniform(math.log(narrowest), math.log(widest)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            return left, top, left + w, top + h
    w = min(width, round(height * widest))
    h = min(height, round(width / narrowest))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def to_rgb(image: Any) -> Any:
    """A Pillow image of any mode as RGB; EXIF rotation is ignored, as ImageNet's users do.

    Transparency is dropped, not blended with a background: what torchvision's and timm's loaders
    do, so that published weights see what they were trained on.
    """
    if image.mode == "RGB":
        return image
    if image.mode in MODES_OF_ONE_NUMBER:
        return _to_8_bit(image).convert("RGB")
    return image.convert("RGB")


def _whole(width: int, height: int) -> Box:
    return 0, 0, width, height


def _check_size(image: Any, content: bytes) -> None:
    pixels = image.width * image.height
    if not 0 < pixels <= MOST_PIXELS:
        raise Unreadable("too many pixels" if pixels else "no pixels")
    # The marker stands before every scan, and by chance now and then in what is no scan.
    jpeg = content.startswith(b"\xff\xd8")
    if jpeg and pixels * content.count(b"\xff\xda") > MOST_SCANNED_PIXELS:
        raise Unreadable("too many scans")


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
        values -= low
        top = high - low
    values *= 255 / max(top, 1e-300)  # in place, like all here: there may be very many
    return Image.fromarray(np.rint(values, out=values).astype(np.uint8))


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
    return reason(error)
