"""Which files segmentation takes, and what it says of others."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from pair_files import (
    SIZE,
    open_pairs,
    reader,
    write,
    write_coordinates,
    write_pair,
    write_pairs,
    zip_folder,
)
from PIL import Image

from deepmoe.data.reading import Unreadable
from deepmoe.errors import UserError


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "set")


def test_classes_are_counted_in_the_training_labels_or_named_in_a_file(pairs: Path) -> None:
    assert open_pairs(pairs).info.class_names == tuple(f"class {i}" for i in range(5))
    (pairs / "classes.txt").write_text("sky\nroad\n\ncar\ntree\nsign\npole\n")
    assert open_pairs(pairs).info.class_names == ("sky", "road", "car", "tree", "sign", "pole")
    (pairs / "classes.txt").write_text("sky\nsky\n")
    with pytest.raises(UserError, match="must name each class"):
        open_pairs(pairs)


def test_a_label_beyond_the_classes_is_not_trained_on(pairs: Path) -> None:
    (pairs / "classes.txt").write_text("one\ntwo\nthree\nfour\n")
    with pytest.raises(Unreadable, match="label id 4 is beyond the 4 classes"):
        reader(pairs).read(0, None)


def test_palette_and_colour_labels(pairs: Path) -> None:
    path = pairs / "labels/train/image0.png"
    ids = Image.open(path)
    palette = Image.frombytes("P", ids.size, ids.tobytes())
    palette.putpalette([255 - i for i in range(256) for _ in range(3)])
    palette.save(path)
    _, label = reader(pairs).read(0, None)
    assert torch.equal(label, torch.from_numpy(np.asarray(ids).astype(np.int64)))
    ids.convert("RGB").save(path)
    with pytest.raises(Unreadable, match="label map: pixels of mode RGB"):
        reader(pairs).read(0, None)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_ids_of_few_bits_are_taken_as_they_are(depth: int, pairs: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 2**depth, SIZE)
    (pairs / "labels/train/image0.png").write_bytes(grey_png(ids, depth))
    (pairs / "classes.txt").write_text("\n".join(map(str, range(16))))
    _, label = reader(pairs).read(0, None)
    assert torch.equal(label, torch.from_numpy(ids))


def grey_png(ids: np.ndarray, depth: int) -> bytes:
    """By hand, as Pillow writes grey of 8 bits only."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    bits = ids[..., None] >> np.arange(depth)[::-1] & 1
    rows = np.packbits(bits.reshape(len(ids), -1).astype(np.uint8), axis=1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", ids.shape[1], ids.shape[0], depth, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)


def test_label_maps_that_cannot_be_told_exactly_are_unreadable(pairs: Path) -> None:
    path = pairs / "labels/train/image0.png"
    ids = Image.open(path)
    ids.save(path, "JPEG")
    with pytest.raises(Unreadable, match="label map: JPEG instead of PNG"):
        reader(pairs).read(0, None)
    Image.fromarray(np.full(SIZE, 300, np.uint16)).save(path, "PNG")
    with pytest.raises(Unreadable, match="label map: pixels of mode I;16, not ids of 8 bits"):
        reader(pairs).read(0, None)


def test_images_of_16_bits_are_scaled_not_clipped(pairs: Path) -> None:
    path = pairs / "images/train/image0.png"
    Image.fromarray(np.full(SIZE, 128 * 257, np.uint16)).save(path)
    image, _ = reader(pairs).read(0, None)
    assert (image == 128).all()


def test_a_program_in_place_of_an_image_is_not_run(pairs: Path) -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 24\nshowpage\n"
    for folder in ("images", "labels"):
        (pairs / folder / "train/image0.png").write_bytes(script)
    with pytest.raises(Unreadable, match="image: not an image"):
        reader(pairs).read(0, None)


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ("labels/train/image1.png", "images/train/image1.png"),
        ("images/test/image4.png", "labels/test/image4.png"),
    ],
)
def test_a_missing_partner_is_named(pairs: Path, missing: str, left: str) -> None:
    (pairs / missing).unlink()
    with pytest.raises(UserError, match=f"{left} in .* has no (label map|image) of the same name"):
        open_pairs(pairs)


def test_bad_roots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_pairs(tmp_path / "nowhere")
    (tmp_path / "file.zip").write_bytes(b"not a zip")
    with pytest.raises(UserError, match="neither a folder nor a zip file"):
        open_pairs(tmp_path / "file.zip")
    with pytest.raises(UserError, match="no folder images/SPLIT"):
        open_pairs(tmp_path)
    write_pair(tmp_path, "test", "a", np.zeros(SIZE))
    with pytest.raises(UserError, match="no images in images/train"):
        open_pairs(tmp_path)


def test_unusable_pairs_are_skipped_and_counted(pairs: Path, caplog) -> None:
    write(pairs, "labels/train/image0.png", np.zeros((SIZE[0], SIZE[1] - 1)))
    for folder, stem in (("images", "image1"), ("labels", "image3")):
        (path,) = pairs.glob(f"{folder}/*/{stem}.png")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (pairs / "images/test/image4.png").write_bytes(b"text")
    data = open_pairs(pairs, crop=(8, 8), batch_size=3, unreadable_limit=1.0)
    ((images, labels),) = data.train.epoch(0)
    assert images.shape == (3, 3, 8, 8) and labels.shape == (3, 8, 8)  # image2 in place of all
    assert data.train.skipped == 2
    assert "skipped images/train/image0.png: image is 40x24 px but its label map 39x24" in (
        caplog.text
    )
    assert "image1.png: image: image file is truncated" in caplog.text
    with pytest.raises(UserError, match=r"none of 2 files like images/test/image3.png can"):
        list(data.evaluation)
    assert data.evaluation.skipped == 2
    assert "image3.png: label map: image file is truncated" in caplog.text
    assert "image4.png: image: not an image" in caplog.text
    with pytest.raises(UserError, match=r"data\.unreadable_limit"):
        list(open_pairs(pairs, crop=(8, 8)).evaluation)


def test_damage_inside_a_zip_is_unreadable(tmp_path: Path) -> None:
    write_coordinates(tmp_path / "set")
    path = zip_folder(tmp_path / "set", tmp_path / "set.zip")
    content = bytearray(path.read_bytes())
    at = content.index(b"IDAT", content.index(b"images/train/a.png")) + 20
    content[at] ^= 0xFF  # the zip's own checksum tells
    path.write_bytes(content)
    with pytest.raises(Unreadable, match="image: damaged in the zip file"):
        reader(path).read(0, None)


def test_two_images_for_one_label_map_are_refused(pairs: Path) -> None:
    write(pairs, "images/train/image0.jpg", np.zeros((*SIZE, 3)))
    with pytest.raises(
        UserError, match=r"images/train/image0.jpg and images/train/image0.png .* same name"
    ):
        open_pairs(pairs)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_that_are_all_void_are_refused(split: str, named: bool, pairs: Path) -> None:
    if named:
        (pairs / "classes.txt").write_text("\n".join("abcde"))
    for path in (pairs / "labels" / split).iterdir():
        write(pairs, f"labels/{split}/{path.name}", np.full(SIZE, 255))
    with pytest.raises(
        UserError, match=rf"like labels/{split}/.* holds a class: all pixels are void"
    ):
        open_pairs(pairs)
    for path in (pairs / "labels" / split).iterdir():
        Image.new("RGB", SIZE[::-1]).save(path)
    with pytest.raises(UserError, match="holds a class: label map: pixels of mode RGB"):
        open_pairs(pairs)


def test_one_class_is_refused(pairs: Path) -> None:
    (pairs / "classes.txt").write_text("everything\n")
    for path in pairs.glob("labels/*/*"):
        write(pairs, str(path.relative_to(pairs)), np.zeros(SIZE))
    with pytest.raises(UserError, match=r"only one class \(everything\)"):
        open_pairs(pairs)
    (pairs / "classes.txt").unlink()
    with pytest.raises(UserError, match=r"only one class \(class 0\)"):
        open_pairs(pairs)


def test_odd_files_of_class_names_are_one_sentence(pairs: Path) -> None:
    path = pairs / "classes.txt"
    for content, message in {
        b"a\n" * 2**16: "bytes are more than",
        b"\xff\xfea\0": "can't decode",
        "\n".join(map(str, range(256))).encode(): "no more than 255",
    }.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"classes.txt in .*{message}"):
            open_pairs(pairs)
    path.write_bytes(b"\xef\xbb\xbfsky\r\nroad\r\ncar\r\ntree\r\nsign")  # as Windows writes it
    assert open_pairs(pairs).info.class_names[:2] == ("sky", "road")
    path.unlink()
    os.mkfifo(path)  # nobody ever writes into it
    with pytest.raises(UserError, match="not a regular file"):
        open_pairs(pairs)
