import dataclasses
import io
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepmoe.config import DataConfig
from deepmoe.data import open_data
from deepmoe.data.file_tree import FileTree
from deepmoe.data.reading import Unreadable
from deepmoe.data.segmentation import MEAN_COLOUR
from deepmoe.errors import UserError

SIZE = (24, 40)
CAMVID = Path(__file__).parents[3] / "shared" / "data" / "camvid" / "camvid-480x360.zip"


def write(root: Path, name: str, pixels: np.ndarray) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def write_pair(root: Path, split: str, stem: str, label: np.ndarray, seed: int = 0) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (*label.shape, 3))
    write(root, f"images/{split}/{stem}.png", image)
    write(root, f"labels/{split}/{stem}.png", label)


def write_coordinates(root: Path, size: tuple[int, int] = SIZE) -> None:
    """Every pixel's image and label say where it is: red its row, green its column."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    for split in ("train", "test"):
        write(
            root,
            f"images/{split}/a.png",
            np.stack([4 * rows, 4 * columns, np.zeros(size)], axis=-1),
        )
        write(root, f"labels/{split}/a.png", rows)
    (root / "classes.txt").write_text("\n".join(f"row {i}" for i in range(size[0])))


def zip_folder(folder: Path, target: Path, top: str = "") -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, f"{top}{path.relative_to(folder).as_posix()}")
        archive.writestr(f"__MACOSX/{top}images/train/a.png", b"junk")
    return target


def open_pairs(root: Path, batch_size: int = 1, **options):
    options = {"workers": 0, **options}
    config = DataConfig(name="segmentation-pairs", root=str(root), **options)
    return open_data(config, batch_size=batch_size)


def reader(root: Path, **options):
    return open_pairs(root, **options).train.reader


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Three training and two test pairs of classes 0 to 4, with some void."""
    rng = np.random.default_rng(1)
    for i in range(5):
        label = rng.integers(0, 5, SIZE)
        label[:3] = 255
        write_pair(tmp_path / "set", "train" if i < 3 else "test", f"image{i}", label, seed=i)
    return tmp_path / "set"


def test_a_zip_gives_what_its_folder_gives(pairs: Path, tmp_path: Path) -> None:
    plain = zip_folder(pairs, tmp_path / "plain.zip")
    nested = zip_folder(pairs, tmp_path / "nested.zip", top="set/")
    options = {"crop": (16, 16), "scale": (0.5, 2.0), "shift": 3, "batch_size": 3}
    expected = open_pairs(pairs, **options)
    for root in (plain, nested, tmp_path):
        found = open_pairs(root, **options)
        assert found.info == expected.info
        for a, b in zip(expected.train.epoch(1), found.train.epoch(1), strict=True):
            assert torch.equal(a[0], b[0])
            assert torch.equal(a[1], b[1])
        for a, b in zip(expected.evaluation, found.evaluation, strict=True):
            assert torch.equal(a[0], b[0])
            assert torch.equal(a[1], b[1])


def test_worker_processes_read_a_zip(pairs: Path, tmp_path: Path) -> None:
    archive = zip_folder(pairs, tmp_path / "plain.zip")
    options = {"crop": (16, 16), "batch_size": 3}
    (alone,) = open_pairs(archive, **options).train.epoch(0)
    (shared,) = open_pairs(archive, workers=2, **options).train.epoch(0)
    assert torch.equal(alone[0], shared[0])
    assert torch.equal(alone[1], shared[1])


def test_a_pickled_tree_of_an_open_zip_reads_on(pairs: Path, tmp_path: Path) -> None:
    tree = FileTree.open(zip_folder(pairs, tmp_path / "plain.zip"))
    name = tree.names()[0]
    assert tree.names() == FileTree.open(pairs).names()
    assert pickle.loads(pickle.dumps(tree)).read(name) == tree.read(name)


def test_evaluation_gives_whole_images_as_they_are(tmp_path: Path) -> None:
    write_coordinates(tmp_path)
    data = open_pairs(tmp_path, crop=(8, 8), scale=(0.5, 2.0), shift=4)
    ((images, labels),) = data.evaluation
    assert images.shape == (1, 3, *SIZE)
    assert torch.equal(labels[0], torch.arange(SIZE[0])[:, None].expand(SIZE))
    mean, std = torch.tensor(data.info.mean), torch.tensor(data.info.std)
    pixel = images[0, :, 5, 7] * std + mean
    torch.testing.assert_close(pixel, torch.tensor([20.0, 28.0, 0.0]) / 255)
    assert (data.info.task, data.info.size, data.evaluation_name) == (
        "segmentation",
        (8, 8),
        "test",
    )


def test_crops_reach_up_to_shift_beyond_each_side(tmp_path: Path) -> None:
    write_coordinates(tmp_path)
    samples = reader(tmp_path, crop=(12, 16), shift=3)
    starts = set()
    for seed in range(300):
        image, label = samples.read(0, np.random.default_rng(seed))
        assert image.dtype == torch.uint8 and label.dtype == torch.int64
        assert image.shape == (3, 12, 16) and label.shape == (12, 16)
        inside = label != 255
        assert torch.equal(image[0][inside], 4 * label[inside].to(torch.uint8))
        outside = image[:, ~inside]
        assert torch.equal(outside, torch.tensor(MEAN_COLOUR).byte()[:, None].expand_as(outside))
        (row, column), where = torch.nonzero(inside)[0].tolist(), inside.nonzero()
        # What lies inside is one rectangle of rows and columns that follow each other.
        height, width = (where.amax(dim=0) - where.amin(dim=0) + 1).tolist()
        assert inside.sum() == height * width
        block = image[:2, row : row + height, column : column + width] // 4
        assert (block[0].diff(dim=0) == 1).all() and (block[1].diff(dim=1) == 1).all()
        starts.add((int(block[0, 0, 0]) - row, int(block[1, 0, 0]) - column))
    tops, lefts = ({start[axis] for start in starts} for axis in (0, 1))
    assert tops == set(range(-3, SIZE[0] - 12 + 3 + 1))
    assert lefts == set(range(-3, SIZE[1] - 16 + 3 + 1))


def test_scaled_image_and_label_stay_aligned(tmp_path: Path) -> None:
    write_coordinates(tmp_path)
    samples = reader(tmp_path, crop=(20, 20), scale=(0.5, 2.0), shift=2)
    steps, errors = [], []
    for seed in range(60):
        image, label = samples.read(0, np.random.default_rng(seed))
        inside = label != 255
        error = image[0][inside].float() / 4 - label[inside]
        assert error.abs().max() <= 0.75  # nearest label: 0.5, rounding and borders: the rest
        errors.append(error.mean())
        present = label[inside].unique()
        steps.append(float((present.max() - present.min()) / (inside.any(dim=1).sum() - 1)))
    assert abs(torch.stack(errors).mean()) < 0.05
    assert min(steps) < 0.65 and max(steps) > 1.5  # rows a pixel: both ends of the range


def test_an_image_smaller_than_the_crop_is_padded_with_void(tmp_path: Path) -> None:
    write_coordinates(tmp_path)
    samples = reader(tmp_path, crop=(30, 50))
    for seed in range(20):
        image, label = samples.read(0, np.random.default_rng(seed))
        assert (label != 255).sum() == SIZE[0] * SIZE[1]  # nothing is cut off
        padding = image[:, label == 255]
        assert torch.equal(padding, torch.tensor(MEAN_COLOUR).byte()[:, None].expand_as(padding))
    for seed in range(20):  # and however large the shift, something of the image is left
        _, label = reader(tmp_path, crop=(8, 8), shift=99).read(0, np.random.default_rng(seed))
        assert (label != 255).any()


def test_without_a_crop_scaled_images_keep_their_size(tmp_path: Path) -> None:
    write_coordinates(tmp_path)
    data = open_pairs(tmp_path, scale=(0.5, 2.0))
    assert data.info.size == SIZE
    for seed in range(5):
        _, label = data.train.reader.read(0, np.random.default_rng(seed))
        assert label.shape == SIZE


def test_mirroring_flips_image_and_label_together(tmp_path: Path) -> None:
    write_coordinates(tmp_path)
    label = np.tile(np.arange(SIZE[1]) // 2, (SIZE[0], 1))  # the column this time
    write(tmp_path, "labels/train/a.png", label)
    samples = reader(tmp_path)
    image, label = samples.read(0, np.random.default_rng(0))
    images, labels = image.expand(64, -1, -1, -1), label.expand(64, -1, -1)
    plain, _ = samples.finish(images[:1], labels[:1], None)
    out, out_labels = samples.finish(images, labels, torch.Generator().manual_seed(0))
    flipped = [not torch.equal(one, plain[0]) for one in out]
    assert 10 < sum(flipped) < 54
    for one, one_label, flip in zip(out, out_labels, flipped, strict=True):
        assert torch.equal(one, plain[0].flip(2) if flip else plain[0])
        assert torch.equal(one_label, label.flip(1) if flip else label)
    samples.config = dataclasses.replace(samples.config, mirror=False)
    out, _ = samples.finish(images, labels, torch.Generator().manual_seed(0))
    assert torch.equal(out, plain.expand_as(out))


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


def cityscapes_pair(root: Path, split: str, ids: np.ndarray) -> None:
    stem = f"{split}/ulm/ulm_000000_000019"
    write(root, f"leftImg8bit/{stem}_leftImg8bit.png", np.zeros((*ids.shape, 3)))
    write(root, f"gtFine/{stem}_gtFine_labelIds.png", ids)
    write(root, f"gtFine/{stem}_gtFine_instanceIds.png", ids)


def test_cityscapes_ids_become_the_nineteen_classes(tmp_path: Path) -> None:
    ids = np.arange(-1, 34)
    for split in ("train", "val"):
        cityscapes_pair(tmp_path, split, np.tile(ids, (2, 1)))
    data = open_data(DataConfig(name="cityscapes", root=str(tmp_path), workers=0), batch_size=1)
    ((_, labels),) = data.evaluation
    # fmt: off
    names = {
        7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole",
        19: "traffic light", 20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky",
        24: "person", 25: "rider", 26: "car", 27: "truck", 28: "bus", 31: "train",
        32: "motorcycle", 33: "bicycle",
    }
    # fmt: on
    for label_id, label in zip(ids.tolist(), labels[0, 0].tolist(), strict=True):
        name = data.info.class_names[label] if label != 255 else None
        assert name == names.get(label_id)
    assert (data.info.classes, data.evaluation_name) == (19, "val")


def test_evaluation_split_and_holdout(pairs: Path) -> None:
    held = open_pairs(pairs, holdout=1)
    assert held.evaluation_name == "holdout"
    train, held_out = ({p.image for p in s.reader.pairs} for s in (held.train, held.evaluation))
    assert (len(train), len(held_out), train & held_out) == (2, 1, set())
    assert open_pairs(pairs, holdout=1).evaluation.reader.pairs == held.evaluation.reader.pairs
    with pytest.raises(UserError, match="only 3 training images"):
        open_pairs(pairs, holdout=3)
    write_pair(pairs, "val", "v", np.zeros(SIZE))
    assert open_pairs(pairs).evaluation_name == "test"
    held = open_pairs(pairs, holdout=1)
    assert (held.evaluation_name, len(held.train.reader), len(held.evaluation.reader)) == (
        "val",
        3,
        1,
    )
    for folder in ("images", "labels"):
        (pairs / folder / "test").rename(pairs / folder / "unused")
    assert open_pairs(pairs).evaluation_name == "val"
    for folder in ("images", "labels"):
        (pairs / folder / "val").rename(pairs / folder / "unused2")
    with pytest.raises(UserError, match=r"images/test or images/val; data\.holdout"):
        open_pairs(pairs)


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
    with pytest.raises(UserError, match=r"one class only \(everything\)"):
        open_pairs(pairs)
    (pairs / "classes.txt").unlink()
    with pytest.raises(UserError, match=r"one class only \(class 0\)"):
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


def test_training_images_of_several_sizes_can_be_calibrated_on(pairs: Path) -> None:
    write_pair(pairs, "train", "other", np.zeros((10, 12)))
    data = open_pairs(pairs, crop=(8, 8))
    assert data.evaluation.evaluation_batch == 8  # its images are all alike
    sizes = [tuple(images.shape[2:]) for images, _ in data.calibration]
    assert sorted(sizes) == [(10, 12), SIZE, SIZE, SIZE]


def test_images_of_several_sizes(pairs: Path) -> None:
    write_pair(pairs, "train", "other", np.zeros((10, 12)))
    with pytest.raises(UserError, match=r"data\.crop must be set"):
        open_pairs(pairs)
    assert open_pairs(pairs, crop=(8, 8)).evaluation.evaluation_batch == 8
    write_pair(pairs, "test", "other", np.zeros((10, 12)))
    data = open_pairs(pairs, crop=(8, 8), batch_size=4)
    assert [images.shape[2:] for images, _ in data.evaluation] == [SIZE, SIZE, (10, 12)]
    ((images, _),) = data.train.epoch(0)
    assert images.shape == (4, 3, 8, 8)


def test_big_evaluation_images_come_one_at_a_time(tmp_path: Path) -> None:
    label = np.zeros((1024, 2048))
    label[0] = 1
    for split in ("train", "test"):
        write_pair(tmp_path, split, "a", label)
    assert open_pairs(tmp_path).evaluation.evaluation_batch == 1


def test_grey_jpegs_and_hidden_files(pairs: Path) -> None:
    grey = io.BytesIO()
    Image.new("L", SIZE[::-1], 77).save(grey, "jpeg")
    (pairs / "images/train/image0.png").unlink()
    (pairs / "images/train/image0.JPG").write_bytes(grey.getvalue())
    (pairs / "images/train/.DS_Store").write_bytes(b"")
    (pairs / "images/train/.hidden.png").write_bytes(b"")
    samples = reader(pairs)
    assert (len(samples), samples.name(0)) == (3, "images/train/image0.JPG")
    image, _ = samples.read(0, None)
    assert image.shape == (3, *SIZE) and (image == 77).all()


@pytest.mark.skipif(not CAMVID.exists(), reason="CamVid is not here")
def test_camvid() -> None:
    data = open_pairs(CAMVID, batch_size=2, crop=(224, 224), scale=(0.5, 2.0), shift=16)
    assert (len(data.train.reader), len(data.evaluation.reader)) == (367, 233)
    assert (data.info.classes, data.evaluation_name) == (11, "test")
    images, labels = next(data.train.epoch(0))
    assert images.shape == (2, 3, 224, 224) and labels.shape == (2, 224, 224)
    images, labels = next(iter(data.evaluation))
    assert images.shape == (8, 3, 360, 480)
    assert set(labels.unique().tolist()) <= {*range(11), 255}
    assert (labels != 255).double().mean() > 0.5
