"""Segmentation: crops, scales and batches of images with label maps."""

import dataclasses
import io
import pickle
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

from deepmoe.config import DataConfig
from deepmoe.data import open_data
from deepmoe.data.file_tree import FileTree
from deepmoe.data.reading import Unreadable
from deepmoe.data.segmentation import MEAN_COLOUR
from deepmoe.errors import UserError

CAMVID = Path(__file__).parents[3] / "shared" / "data" / "camvid" / "camvid-480x360.zip"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "set")


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


def test_what_would_take_too_much_memory_is_refused(tmp_path: Path) -> None:
    write_coordinates(tmp_path)
    with pytest.raises(Unreadable, match="too many pixels, once it is scaled"):
        reader(tmp_path, scale=(1.0, 400.0)).read(0, np.random.default_rng(0))
    with pytest.raises(UserError, match=r"data.crop has too many pixels: 100000 x 100000"):
        reader(tmp_path, crop=(100_000, 100_000))


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
