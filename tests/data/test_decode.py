"""Every kind of image file becomes RGB, and what is damaged is called unreadable."""

import os
import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deepmoe.config import DataConfig
from deepmoe.data import decode, read_image
from deepmoe.data.decode import centre_box, decode_box, random_box
from deepmoe.data.reading import Unreadable
from deepmoe.errors import UserError


def packed(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def whole(width: int, height: int) -> tuple[float, float, float, float]:
    return 0, 0, width, height


def decoded(content: bytes, size: int = 8) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return decode_box(content, whole, size, shrink=False)


def grey(values: np.ndarray, kind: str = "TIFF") -> bytes:
    return packed(Image.fromarray(values), kind)


def full(value: float, dtype: Any) -> np.ndarray:
    return np.full((6, 9), value, dtype)


def palette(**options: Any) -> bytes:
    image = Image.new("P", (9, 6), 1)
    image.putpalette([0, 0, 0, 10, 200, 30, 255, 255, 255])
    return packed(image, **options)


COLOUR = (10, 200, 30)
FLAT = {
    "RGB": (packed(Image.new("RGB", (9, 6), COLOUR)), COLOUR),
    "RGB as BMP": (packed(Image.new("RGB", (9, 6), COLOUR), "BMP"), COLOUR),
    "RGB as TIFF": (packed(Image.new("RGB", (9, 6), COLOUR), "TIFF"), COLOUR),
    "RGB as WebP": (packed(Image.new("RGB", (9, 6), COLOUR), "WEBP", lossless=True), COLOUR),
    "grey": (packed(Image.new("L", (9, 6), 77)), (77, 77, 77)),
    "grey as JPEG": (packed(Image.new("L", (9, 6), 77), "JPEG"), (77, 77, 77)),
    "grey, half transparent": (packed(Image.new("LA", (9, 6), (77, 50))), (77, 77, 77)),
    "transparent": (packed(Image.new("RGBA", (9, 6), (*COLOUR, 0))), COLOUR),
    "one bit": (packed(Image.new("1", (9, 6), 1)), (255, 255, 255)),
    "palette": (palette(), COLOUR),
    "palette, one colour transparent": (palette(transparency=1), COLOUR),
    "palette, each colour transparent": (palette(transparency=bytes([0, 99, 255])), COLOUR),
    "CMYK as TIFF": (packed(Image.new("CMYK", (9, 6), (255, 0, 0, 0)), "TIFF"), (0, 255, 255)),
    "16 bits": (grey(full(128 * 257, np.uint16), "PNG"), (128, 128, 128)),
    "16 bits, white": (grey(full(65535, np.uint16), "PNG"), (255, 255, 255)),
    "16 bits, nearly black": (grey(full(257, np.uint16), "PNG"), (1, 1, 1)),
    "16 bits as TIFF": (grey(full(128 * 257, np.uint16)), (128, 128, 128)),
    "16 bits as big-endian TIFF": (grey(full(128 * 257, ">u2")), (128, 128, 128)),
    "32 bits that hold 16": (grey(full(128 * 257, np.int32)), (128, 128, 128)),
    "float up to 1": (grey(full(0.2, np.float32)), (51, 51, 51)),
    "float up to 255": (grey(full(51, np.float32)), (51, 51, 51)),
    "float up to 65535": (grey(full(51 * 257, np.float32)), (51, 51, 51)),
}


@pytest.mark.parametrize("kind", FLAT)
def test_flat_images_of_every_kind(kind: str) -> None:
    content, colour = FLAT[kind]
    image = decoded(content)
    assert (image.dtype, image.shape) == (torch.uint8, (3, 8, 8))
    assert image.is_contiguous()
    assert torch.equal(
        image, torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, 8, 8)
    )


def test_cmyk_jpeg_is_not_inverted() -> None:
    image = decoded(packed(Image.new("CMYK", (32, 32), (255, 0, 0, 0)), "JPEG"))
    assert image[0].max() < 10 and image[1:].min() > 245


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(0, 65535, 256).astype(np.uint16),
        np.linspace(-1e6, 5e8, 256).astype(np.int32),
        np.linspace(-3, 7, 256).astype(np.float32),
        np.linspace(0, 1e30, 256).astype(np.float32),
    ],
    ids=["16 bits", "signed 32 bits", "negative float", "huge float"],
)
def test_many_valued_greys_are_scaled_not_clipped(values: np.ndarray) -> None:
    content = grey(np.repeat(values[None], 256, axis=0))
    expected = torch.arange(256, dtype=torch.uint8).expand(3, 256, 256)
    assert (decoded(content, 256).int() - expected.int()).abs().max() <= 1


def test_exif_rotation_is_ignored() -> None:
    image = Image.new("RGB", (64, 32), (255, 0, 0))
    image.paste((0, 0, 255), (32, 0, 64, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = decoded(packed(image, "JPEG", exif=exif.tobytes()))
    assert torch.equal(turned, decoded(packed(image, "JPEG")))
    assert turned[0, :, 0].min() > 200 and turned[0, :, -1].max() < 50


def photo(width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(0).integers(256, size=(5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def broken_png() -> bytes:
    content = bytearray(packed(photo(40, 30)))
    content[8:12] = struct.pack(">I", 2**31)  # the length of the header
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"just a note", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (packed(photo(400, 300), "JPEG")[:2000], "truncated"),
        (packed(photo(400, 300))[:2000], "truncated"),
        (packed(photo(400, 300), "BMP")[:2000], "truncated"),
        (broken_png(), "^."),
        (grey(full(np.nan, np.float32)), "not finite"),
    ],
    ids=["empty", "text", "program", "JPEG", "PNG", "BMP", "header", "NaN"],
)
@pytest.mark.parametrize("shrink", [False, True])
def test_damaged_files_are_unreadable(content: bytes, reason: str, shrink: bool) -> None:
    with pytest.raises(Unreadable, match=reason) as caught:
        decode_box(content, whole, 8, shrink=shrink)
    assert 0 < len(str(caught.value)) < 110 and "\n" not in str(caught.value)


def header_only(width: int, height: int) -> bytes:
    """A PNG that promises this size and holds no pixels."""
    content = bytearray(packed(Image.new("L", (1, 1))))
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


@pytest.mark.parametrize("side", [2**14, 2**16])  # below and above the limit of Pillow's own
def test_a_decompression_bomb_is_unreadable_before_it_is_decoded(side: int) -> None:
    with pytest.raises(Unreadable, match="too many pixels"):
        decoded(header_only(side, 2**13 + 1))
    with pytest.raises(Unreadable, match="truncated"):
        decoded(header_only(2**13, 2**14))  # just within the limit, and without a warning


@pytest.mark.parametrize("size", [(0, 9), (9, 0), (0, 0)])
def test_images_without_pixels_are_unreadable(size: tuple[int, int]) -> None:
    with pytest.raises(Unreadable, match=r"not an image|no pixels"):
        decoded(header_only(*size))
    empty_bmp = bytearray(packed(Image.new("RGB", (4, 4)), "BMP"))
    empty_bmp[18:26] = struct.pack("<ii", *size)
    with pytest.raises(Unreadable):
        decoded(bytes(empty_bmp))


def test_a_jpeg_that_repeats_its_scans_is_unreadable() -> None:
    content = packed(Image.new("L", (4000, 4000), 128), "JPEG", progressive=True)
    scan = content[content.rindex(b"\xff\xda") : -2]
    assert len(scan) < 100  # though a decoder takes as long for it as for the first
    assert decoded(content).float().mean() == 128
    with pytest.raises(Unreadable, match="too many scans"):
        decoded(content[:-2] + scan * 1000 + content[-2:])


def test_absurd_metadata_is_no_concern() -> None:
    exif = (
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x1a\x01\x05\0\xff\xff\xff\x7f\xff\xff\xff\x7f" * 9
    )
    content = packed(Image.new("RGB", (9, 6), (77, 77, 77)), "JPEG", exif=exif)
    assert (decoded(content) == 77).all()


def read(path: Path) -> torch.Tensor:
    return read_image(path, 8, DataConfig(name="cifar10"))


def test_single_files_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "odd \n\x1b[2J\udcff.png"
    path.write_bytes(packed(Image.new("RGB", (9, 6), COLOUR)))
    assert torch.equal(read(path), decoded(path.read_bytes()))


def test_other_things_than_image_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    os.mkfifo(tmp_path / "pipe.png")  # nobody ever writes into it
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(2**28 + 1)
    for name, reason in {
        "script.png": "not an image",
        "pipe.png": "not a regular file",
        "endless.png": "not a regular file",
        "folder.png": "Is a directory",
        "huge.png": "268,435,457 bytes are more than the 268,435,456 that are read",
        "missing.png": "No such file or directory",
        "zero\0byte.png": "embedded null byte",
    }.items():
        with pytest.raises(UserError) as caught:
            read(tmp_path / name)
        assert str(caught.value) == f"cannot read image {tmp_path / name}: {reason}"


@pytest.fixture
def decoded_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sizes of the images as they left their decoder."""
    sizes: list[tuple[int, int]] = []

    def spy(image: Any) -> Any:
        sizes.append(image.size)
        return to_rgb(image)

    to_rgb = decode.to_rgb
    monkeypatch.setattr(decode, "to_rgb", spy)
    return sizes


@pytest.mark.parametrize(
    ("box", "size", "expected"),
    [
        ((0, 0, 803, 601), 56, (101, 76)),  # to an eighth
        ((0, 0, 803, 601), 80, (201, 151)),
        ((100, 50, 600, 450), 200, (402, 301)),  # exactly twice as high as needed
        ((100, 50, 600, 449), 200, (803, 601)),
        ((0, 0, 20, 20), 224, (803, 601)),
    ],
)
def test_large_jpegs_are_decoded_smaller_but_look_the_same(
    box: Any, size: int, expected: tuple[int, int], decoded_sizes: list[tuple[int, int]]
) -> None:
    content = packed(photo(803, 601), "JPEG", quality=95)
    fast = decode_box(content, lambda *_: box, size, shrink=True)
    exact = decode_box(content, lambda *_: box, size, shrink=False)
    assert decoded_sizes == [expected, (803, 601)]
    assert (fast.int() - exact.int()).abs().max() <= 4


def test_a_shrunk_crop_is_never_smaller_than_the_result(
    decoded_sizes: list[tuple[int, int]],
) -> None:
    content = packed(photo(1001, 667), "JPEG")
    rng = np.random.default_rng(0)
    for _ in range(40):
        box = random_box(rng, 0.08, 1001, 667)
        decode_box(content, lambda *_, box=box: box, 120, shrink=True)
        scale = round(1001 / decoded_sizes[-1][0])
        assert min(box[2] - box[0], box[3] - box[1]) / scale >= 120 or scale == 1
    assert {size[0] for size in decoded_sizes} == {1001, 501, 251}


def by_the_book(rng: np.random.Generator, min_area: float, width: int, height: int) -> tuple:
    """torchvision's RandomResizedCrop.get_params, line by line, with draws from `rng`."""
    area = height * width
    log_ratio = np.log(np.array([3 / 4, 4 / 3]))
    for _ in range(10):
        target_area = area * rng.uniform(min_area, 1.0)
        aspect_ratio = np.exp(rng.uniform(log_ratio[0], log_ratio[1]))
        w = round(np.sqrt(target_area * aspect_ratio))
        h = round(np.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            i = rng.integers(0, height - h + 1)
            j = rng.integers(0, width - w + 1)
            return j, i, j + w, i + h
    in_ratio = float(width) / float(height)
    if in_ratio < 3 / 4:
        w = width
        h = round(w / (3 / 4))
    elif in_ratio > 4 / 3:
        h = height
        w = round(h * (4 / 3))
    else:
        w, h = width, height
    i, j = (height - h) // 2, (width - w) // 2
    return j, i, j + w, i + h


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (100, 100), (20, 300), (301, 17), (1, 1), (900, 2)]
)
def test_random_boxes_are_torchvisions(width: int, height: int) -> None:
    ours, theirs = np.random.default_rng(5), np.random.default_rng(5)
    for _ in range(200):
        box = random_box(ours, 0.08, width, height)
        assert box == by_the_book(theirs, 0.08, width, height)
        assert 0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= height


def test_random_boxes_have_uniform_areas_even_ratios_and_even_places() -> None:
    rng = np.random.default_rng(0)
    side = 10_000
    boxes = np.array([random_box(rng, 0.08, side, side) for _ in range(4000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    share, ratio = w * h / side**2, np.log(w / h)
    small = share[share < 0.75]  # which fit a square at any of the ratios
    assert share.min() == pytest.approx(0.08, abs=0.01)
    counts = np.histogram(small, bins=5, range=(0.08, 0.75))[0]
    assert counts == pytest.approx(np.full(5, len(small) / 5), rel=0.12)
    assert ratio[share < 0.75].mean() == pytest.approx(0, abs=0.01)
    assert ratio[share < 0.75].std() == pytest.approx(2 * np.log(4 / 3) / np.sqrt(12), rel=0.05)
    for start, length in ((boxes[:, 0], w), (boxes[:, 1], h)):
        assert (start / np.maximum(side - length, 1)).mean() == pytest.approx(0.5, abs=0.02)


def test_default_evaluation_box_of_imagenet() -> None:
    # 500x375 becomes 341x256, of which 224x224 from (58, 16) are kept.
    box = centre_box(256, 224, 500, 375)
    expected = np.array([58 * 500 / 341, 16 * 375 / 256, 282 * 500 / 341, 240 * 375 / 256])
    np.testing.assert_allclose(box, expected)
