import pytest
import torch
from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data import BatchLoader, DataInfo, Shard, Split, open_data
from deepmoe.data.augment import look_at, random_views
from deepmoe.errors import UserError

INFO = DataInfo(("a", "b"), (6, 6), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def split(count: int) -> Split:
    images = torch.randint(0, 256, (count, 3, 6, 6), dtype=torch.uint8)
    return Split(images, torch.arange(count))


def labels_of(batches) -> list[int]:
    return [int(label) for _, labels in batches for label in labels]


def test_iteration_gives_every_image_once_in_order() -> None:
    loader = BatchLoader(split(10), INFO, 4)
    assert labels_of(loader) == list(range(10))
    assert [len(labels) for _, labels in loader] == [4, 4, 2]


def test_an_epoch_shuffles_by_seed_and_number_alone() -> None:
    data = split(40)
    augment = DataConfig(crop_padding=2)
    first = list(BatchLoader(data, INFO, 8, augment=augment, seed=1).epoch(3))
    torch.randn(7)  # the global generator plays no part
    again = list(BatchLoader(data, INFO, 8, augment=augment, seed=1).epoch(3))
    for (x, y), (x_again, y_again) in zip(first, again, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
    assert sorted(labels_of(first)) == list(range(40))
    others = [BatchLoader(data, INFO, 8, seed=s).epoch(e) for s, e in [(1, 4), (2, 3)]]
    for other in others:
        assert labels_of(other) != labels_of(first)


def test_an_epoch_can_be_entered_anywhere() -> None:
    loader = BatchLoader(split(40), INFO, 8, augment=DataConfig(crop_padding=2), seed=1)
    whole = list(loader.epoch(3))
    for (x, y), (x_late, y_late) in zip(whole[2:], loader.epoch(3, start=2), strict=True):
        assert torch.equal(x, x_late)
        assert torch.equal(y, y_late)


def test_shards_together_are_the_whole() -> None:
    data, augment = split(40), DataConfig(crop_padding=2)
    whole = BatchLoader(data, INFO, 8, augment=augment)
    shards = [BatchLoader(data, INFO, 8, augment=augment, shard=Shard(r, 2)) for r in range(2)]
    parts = zip(whole.epoch(1), *(s.epoch(1) for s in shards), strict=True)
    for (x, y), (x0, y0), (x1, y1) in parts:
        assert torch.equal(x, torch.cat([x0, x1]))
        assert torch.equal(y, torch.cat([y0, y1]))
    assert sorted(labels_of(shards[0]) + labels_of(shards[1])) == list(range(40))
    with pytest.raises(UserError, match="can't be shared evenly by 3"):
        next(BatchLoader(data, INFO, 8, shard=Shard(0, 3)).epoch(0))


def test_an_epoch_leaves_out_the_incomplete_batch() -> None:
    loader = BatchLoader(split(10), INFO, 4)
    assert loader.batches_per_epoch == 2
    assert [len(labels) for _, labels in loader.epoch(0)] == [4, 4]
    assert len(labels_of(BatchLoader(split(3), INFO, 64).epoch(0))) == 3


def test_normalisation() -> None:
    x = INFO.normalise(
        torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 3, 6, 6)
    )
    torch.testing.assert_close(x[:, 0, 0, 0], torch.tensor([-2.0, 2.0]))


def cut_out(padded: Tensor, crop: Tensor) -> list[tuple[int, int]]:
    side = crop.shape[-1]
    places = range(padded.shape[-1] - side + 1)
    return [
        (r, c)
        for r in places
        for c in places
        if torch.equal(padded[:, r : r + side, c : c + side], crop)
    ]


def test_random_crop_cuts_each_image_at_its_own_place() -> None:
    images = torch.randint(1, 256, (50, 3, 6, 6), dtype=torch.uint8)
    views = random_views(len(images), 2, False, torch.Generator().manual_seed(0))
    crops = look_at(images, views, 2)
    assert crops.shape == images.shape
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    places = [cut_out(p, c) for p, c in zip(padded, crops, strict=True)]
    assert all(places)
    assert len({p[0] for p in places}) > 15  # of 25 possible
    assert look_at(images, random_views(len(images), 0, False, torch.Generator()), 0) is images


def test_random_mirror_flips_about_half() -> None:
    images = torch.randint(0, 256, (100, 3, 6, 6), dtype=torch.uint8)
    views = random_views(len(images), 0, True, torch.Generator().manual_seed(0))
    mirrored = look_at(images, views, 0)
    flipped = [torch.equal(m, i.flip(2)) for m, i in zip(mirrored, images, strict=True)]
    same = [torch.equal(m, i) for m, i in zip(mirrored, images, strict=True)]
    assert all(f or s for f, s in zip(flipped, same, strict=True))
    assert 30 < sum(flipped) < 70


@pytest.mark.parametrize("size", [8, 16, 32])
def test_digits(size: int) -> None:
    data = open_data(DataConfig(name="digits", size=size), batch_size=64)
    assert (len(data.train.split), len(data.evaluation.split)) == (1437, 360)
    assert data.info.classes == 10
    assert data.info.size == (size, size)
    assert data.train.split.images.shape[1:] == (3, size, size)
    assert data.evaluation.split.labels.bincount().min() >= 34
    x = data.info.normalise(data.train.split.images)
    assert x.mean().abs() < 1e-3
    assert x.std().item() == pytest.approx(1, abs=1e-2)


def test_digits_of_an_odd_size_are_refused() -> None:
    with pytest.raises(UserError, match="8 to 32 px"):
        open_data(DataConfig(name="digits", size=64), batch_size=64)
