"""Image folders: layout, loading, skipping, reproducible crops."""

import os
import pickle
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepmoe.config import DataConfig
from deepmoe.data import DataSource, Shard, open_data
from deepmoe.data.image_folder import ImageFolderReader, open_image_folder
from deepmoe.data.reading import Unreadable
from deepmoe.data.workers import WorkerLoader
from deepmoe.errors import UserError

REAL = Path(__file__).parents[3] / "shared" / "data" / "imagenette" / "imagenette-mini.zip"
SIZE = 28  # an eighth of 224, so evaluation resizes to 32


def noise(seed: int, width: int = 50, height: int = 40) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(256, size=(5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes of 8 training and 2 evaluation images."""
    for number in range(30):
        split = "train" if number < 24 else "val"
        name = f"{split}/class{number % 3}/{number:02}.{('JPEG', 'png')[number % 2]}"
        save(noise(number), tmp_path / "root" / name)
    return tmp_path / "root"


def pack(root: Path, outer: str = "") -> Path:
    path = root.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(root.rglob("*.*")):
            archive.write(file, outer + file.relative_to(root).as_posix())
    return path


def config(root: Path, **options: object) -> DataConfig:
    values = {"size": SIZE, "workers": 0, **options}
    return DataConfig(name="image-folder", root=str(root), **values)  # type: ignore[arg-type]


def open_root(root: Path, seed: int = 0, batch_size: int = 8, **options: object) -> DataSource:
    return open_data(config(root, **options), batch_size=batch_size, seed=seed)


def readers(source: DataSource) -> tuple[ImageFolderReader, ImageFolderReader]:
    assert isinstance(source.train, WorkerLoader) and isinstance(source.evaluation, WorkerLoader)
    train, evaluation = source.train.reader, source.evaluation.reader
    assert isinstance(train, ImageFolderReader) and isinstance(evaluation, ImageFolderReader)
    return train, evaluation


def all_batches(loader: object) -> torch.Tensor:
    return torch.cat([images for images, _ in loader])  # type: ignore[attr-defined]


def test_classes_files_and_labels_follow_the_folders(root: Path) -> None:
    save(noise(0), root / "train" / "class0" / "deep" / "er.PNG")  # as in Tiny ImageNet
    (root / "train" / "class0" / "notes.txt").write_text("no image")
    save(noise(0), root / "train" / "stray.png")
    source = open_root(root)
    train, evaluation = readers(source)
    assert source.info.class_names == ("class0", "class1", "class2")
    assert source.info.size == (SIZE, SIZE)
    assert source.evaluation_name == "val"
    assert (len(train), len(evaluation)) == (25, 6)
    for reader in (train, evaluation):
        for index in range(len(reader)):
            image, label = reader.read(index, None)
            assert (image.shape, image.dtype) == ((3, SIZE, SIZE), torch.uint8)
            assert (label.shape, label.dtype) == ((), torch.int64)
            assert reader.name(index).split("/")[1] == f"class{label}"
    assert train.name(8) == "train/class0/deep/er.PNG"


def test_folder_zip_and_wrapped_zip_give_the_same_samples(root: Path) -> None:
    expected = open_root(root)
    for outer in ("", "imagenet/", "a/b/"):
        found = open_root(pack(root, outer))
        assert found.info == expected.info
        for ours, theirs in zip(
            found.train.epoch(1), expected.train.epoch(1), strict=True
        ):  # shuffled alike, too
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert torch.equal(all_batches(found.evaluation), all_batches(expected.evaluation))


@pytest.mark.parametrize("name", ["validation", "test"])
def test_other_names_of_the_evaluation_folder(root: Path, name: str) -> None:
    (root / "val").rename(root / name)
    assert readers(open_root(root))[1].name(0).startswith(name + "/")


def test_the_seed_alone_decides_on_order_and_crops(root: Path) -> None:
    first, again, other = (open_root(root, seed).train for seed in (1, 1, 2))
    batches = list(first.epoch(3))
    assert len(batches) == 3
    for ours, theirs in zip(batches, again.epoch(3), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert torch.equal(next(again.epoch(3, start=2))[0], batches[2][0])
    assert not torch.equal(next(other.epoch(3))[0], batches[0][0])
    assert not torch.equal(next(first.epoch(4))[0], batches[0][0])


def test_a_reader_survives_pickling(root: Path) -> None:
    reader = readers(open_root(pack(root)))[0]
    copy = pickle.loads(pickle.dumps(reader))
    ours, theirs = (r.read(5, np.random.default_rng(0))[0] for r in (reader, copy))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_files_are_skipped_and_counted(root: Path, workers: int) -> None:
    (root / "train" / "class1" / "04.JPEG").write_bytes(b"")
    (root / "val" / "class1" / "25.png").write_text("no image")
    source = open_root(root, workers=workers, unreadable_limit=0.2)
    assert isinstance(source.train, WorkerLoader) and isinstance(source.evaluation, WorkerLoader)
    for epoch in (0, 1):
        assert [len(images) for images, _ in source.train.epoch(epoch)] == [8, 8, 8]
    assert source.train.skipped == 1
    assert len(all_batches(source.evaluation)) == 5
    assert source.evaluation.skipped == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_unreadable_files_stop_the_run(root: Path, workers: int) -> None:
    for file in (root / "train" / "class1").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    source = open_root(root, workers=workers, unreadable_limit=0.2)
    with pytest.raises(UserError, match=r"of 24 files .*unreadable_limit = 20.*class1"):
        list(source.train.epoch(0))


def test_nothing_to_train_on_is_one_sentence(root: Path) -> None:
    for file in root.rglob("*.*"):
        file.write_bytes(b"")
    source = open_root(root, unreadable_limit=1.0)
    with pytest.raises(UserError, match="training files in a row can't be read"):
        list(source.train.epoch(0))
    with pytest.raises(UserError, match=r"none of 6 files like val/class0/24.JPEG can be read"):
        list(source.evaluation)


def test_a_file_that_vanishes_is_unreadable(root: Path) -> None:
    reader = readers(open_root(root))[0]
    (root / reader.name(3)).unlink()
    with pytest.raises(Unreadable, match="No such file"):
        reader.read(3, None)


def test_holdout_is_even_disjoint_fixed_and_needs_no_evaluation_folder(root: Path) -> None:
    for file in (root / "val").rglob("*.*"):
        file.unlink()
    for folder in [*(root / "val").iterdir(), root / "val"]:
        folder.rmdir()
    sources = [open_root(root, seed, holdout=6) for seed in (0, 1)]
    names = []
    for source in sources:
        assert source.evaluation_name == "holdout"
        train, held = readers(source)
        assert np.bincount(held.labels_N).tolist() == [2, 2, 2]
        assert np.bincount(train.labels_N).tolist() == [6, 6, 6]
        names.append([held.name(i) for i in range(6)])
        assert not set(names[-1]) & {train.name(i) for i in range(18)}
        assert all(f"class{label}" in n for n, label in zip(names[-1], held.labels_N, strict=True))
    assert names[0] == names[1]


def remove(root: Path, folder: str) -> None:
    for path in sorted((root / folder).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (root / folder).rmdir()


@pytest.mark.parametrize("as_zip", [False, True])
@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("train", "no folder named train"),
        ("val", "no folder named val, validation or test; data.holdout"),
        ("val/class2", ""),  # a class without evaluation images is no mistake
        ("train/class2", "has a class class2 in val, but not in train"),
    ],
)
def test_missing_folders(root: Path, missing: str, message: str, as_zip: bool) -> None:
    remove(root, missing)
    place = pack(root) if as_zip else root
    if message:
        with pytest.raises(UserError, match=message):
            open_root(place)
    else:
        assert open_root(place).info.classes == 3


@pytest.mark.parametrize("folder", ["train/class3", "val/class1"])
def test_an_empty_class(root: Path, folder: str) -> None:
    if (root / folder).exists():
        remove(root, folder)
    (root / folder).mkdir()
    (root / folder / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match=f"no images in {folder}"):
        open_root(root)
    (root / folder / "notes.txt").unlink()
    with pytest.raises(UserError, match=f"no images in {folder}"):
        open_root(root)


def test_one_class_is_refused(root: Path) -> None:
    for split in ("train", "val"):
        for name in ("class1", "class2"):
            remove(root, f"{split}/{name}")
    with pytest.raises(UserError, match=r"only one class \(class0\)"):
        open_root(root)


def test_classes_that_cannot_be_judged_are_told(root: Path, caplog) -> None:
    remove(root, "val/class0")
    remove(root, "val/class2")
    open_root(root)
    assert "2 of 3 classes have no evaluation images: class0, class2" in caplog.text
    caplog.clear()
    for file in sorted((root / "train" / "class1").iterdir())[1:]:
        file.unlink()
    open_root(root, holdout=3)
    assert "1 of 3 classes have no training images: class1" in caplog.text


def test_files_that_are_passed_over_are_told(root: Path, caplog) -> None:
    open_root(root)
    assert not caplog.records
    (root / "train" / "class0" / "moving.gif").write_bytes(b"")
    save(noise(0), root / "train" / "stray.png")
    open_root(root)
    assert "2 of 26 files in train are passed over" in caplog.text


@pytest.mark.parametrize("other", ["CLASS0", "ｃｌａｓｓ０"])  # noqa: RUF001
def test_classes_that_look_alike_are_told(root: Path, other: str, caplog) -> None:
    for split in ("train", "val"):
        (root / split / "class2").rename(root / split / other)
    assert open_root(root).info.classes == 3
    assert f"nearly the same name: {min(other, 'class0')} and {max(other, 'class0')}" in caplog.text


def test_a_link_back_does_not_multiply_images(root: Path) -> None:
    (root / "train" / "class0" / "up").symlink_to("..")
    train, _ = readers(open_root(root))
    assert np.bincount(train.labels_N).tolist() == [8, 8, 8]


def test_a_link_to_another_class_does_not_change_labels(root: Path) -> None:
    (root / "train" / "class0" / "more").symlink_to("../class1")
    with pytest.raises(UserError, match=r"train/class1 and train/class0/more in .* same folder"):
        open_root(root)
    (root / "train" / "class0" / "more").unlink()
    remove(root, "val")
    (root / "val").symlink_to("train")  # to see that a network can learn at all
    assert [len(reader) for reader in readers(open_root(root))] == [24, 24]


def test_pipes_and_devices_among_images_are_skipped_and_counted(root: Path) -> None:
    os.mkfifo(root / "train" / "class0" / "pipe.jpg")  # nobody ever writes into it
    (root / "train" / "class1" / "endless.jpg").symlink_to("/dev/zero")
    source = open_root(root, unreadable_limit=0.1)
    assert isinstance(source.train, WorkerLoader)
    assert [len(images) for images, _ in source.train.epoch(0)] == [8, 8, 8]
    list(source.train)
    assert source.train.skipped == 2


def test_file_names_of_any_kind_and_length(root: Path) -> None:
    names = ["line\nbreak.png", "\udcff\udcfe.png", "日本.png", "x" * 250 + ".png"]
    for name in names:
        save(noise(1), root / "train" / "class1" / name)
    train, _ = readers(open_root(root))
    assert {train.name(i) for i in range(len(train))} >= {f"train/class1/{n}" for n in names}
    train = pickle.loads(pickle.dumps(train))
    for index in range(len(train)):
        train.read(index, None)


def test_no_class_folders(tmp_path: Path) -> None:
    save(noise(0), tmp_path / "train" / "0.png")
    with pytest.raises(UserError, match="no class folders in train"):
        open_root(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "data.size"),
        ({"resize": 200}, "data.resize"),
        ({"min_area": 1.5}, "data.min_area"),
        ({"holdout": 24}, "only 24 training images"),
    ],
)
def test_impossible_options(root: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_root(root, **options)


@pytest.mark.parametrize("suffix", ["png", "jpeg"])
@pytest.mark.parametrize(("width", "height"), [(61, 90), (90, 61), (40, 40), (500, 375), (20, 999)])
def test_evaluation_equals_resize_and_centre_crop(
    root: Path, width: int, height: int, suffix: str
) -> None:
    file = root / "val" / "class0" / f"0.{suffix}"
    save(noise(9, width, height), file)
    reader = readers(open_root(root))[1]
    index = [reader.name(i) for i in range(len(reader))].index(f"val/class0/0.{suffix}")
    scale = 32 / min(width, height)
    resized = (int(width * scale + 1e-9), int(height * scale + 1e-9))
    left, top = (round((side - SIZE) / 2) for side in resized)
    with Image.open(file) as image:
        whole = image.convert("RGB").resize(resized, Image.Resampling.BILINEAR)
    expected = np.asarray(whole.crop((left, top, left + SIZE, top + SIZE)))
    found = reader.read(index, None)[0].permute(1, 2, 0).numpy()
    assert np.abs(found.astype(int) - expected).max() <= 1  # they round in another place


def test_finish_normalises_and_changes_only_what_it_is_told_to(root: Path) -> None:
    reader = readers(open_root(root, mirror=False, color_jitter=0.0, lighting=0.0))[0]
    samples = [reader.read(i, None) for i in range(8)]
    images, labels = (torch.stack(parts) for parts in zip(*samples, strict=True))
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    expected = (images / 255 - mean) / std

    def finish(**options: object) -> torch.Tensor:
        changed = replace(reader, config=replace(reader.config, **options))  # type: ignore[arg-type]
        found, same = changed.finish(images, labels, torch.Generator().manual_seed(3))
        assert torch.equal(same, labels)
        return found

    torch.testing.assert_close(reader.finish(images, labels, None)[0], expected)
    torch.testing.assert_close(finish(), expected)
    mirrored = (finish(mirror=True) - expected).abs().amax(dim=(1, 2, 3)) > 1e-4
    assert 0 < mirrored.sum() < 8
    torch.testing.assert_close(finish(mirror=True)[mirrored], expected[mirrored].flip(3))
    lit = ((finish(lighting=0.1) - expected) * std).flatten(2)
    assert lit.std(dim=2).max() < 1e-4 < lit.abs().max()  # one shift for all pixels of a colour
    assert (finish(color_jitter=0.4) - expected).flatten(2).std(dim=2).min() > 1e-3


def test_a_png_that_is_named_jpeg_is_read(root: Path) -> None:  # ImageNet has one
    content = BytesIO()
    noise(2).save(content, "PNG")
    (root / "train" / "class0" / "00.JPEG").write_bytes(content.getvalue())
    save(noise(2), root / "train" / "class0" / "000.png")
    reader = readers(open_root(root))[0]
    assert torch.equal(reader.read(0, None)[0], reader.read(1, None)[0])


@pytest.mark.skipif(not REAL.exists(), reason="needs ../shared/data")
def test_real_photos_of_imagenet() -> None:
    options = DataConfig(name="image-folder", root=str(REAL), size=64, workers=0)
    source = open_image_folder(options, batch_size=50, seed=0, device="cpu", shard=Shard())
    train, evaluation = readers(source)
    assert (source.info.classes, len(train), len(evaluation)) == (10, 1000, 400)
    assert np.bincount(train.labels_N).tolist() == [100] * 10
    assert np.bincount(evaluation.labels_N).tolist() == [40] * 10
    images, labels = next(iter(source.train.epoch(0)))
    assert images.shape == (50, 3, 64, 64) and len(labels.unique()) > 5
    images = all_batches(source.evaluation)
    assert len(images) == 400 and source.evaluation.skipped == 0  # type: ignore[attr-defined]
    # What ImageNet's constants were measured on looks normalised by them.
    assert images.mean(dim=(0, 2, 3)).abs().max() < 0.2
    assert (images.std(dim=(0, 2, 3)) - 1).abs().max() < 0.25
