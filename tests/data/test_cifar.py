import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cifar_files import PIXELS, write_binary, write_python

from deepmoe.config import DataConfig
from deepmoe.data import open_data
from deepmoe.data.cifar import read_cifar
from deepmoe.data.coarse_groups import coarse_groups
from deepmoe.errors import UserError

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_both_layouts_hold_the_same_images(name: str, tmp_path) -> None:
    pickled = read_cifar(write_python(tmp_path / "a", name).parent, name)
    binary = read_cifar(write_binary(tmp_path / "b", name), name)  # the folder itself will do, too
    for one, other in zip(pickled[:2], binary[:2], strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    assert pickled[2] == binary[2]
    assert pickled[2][3] == "class3"
    train, test, _ = pickled
    assert len(train) == (100 if name == "cifar10" else 20)
    assert len(test) == 20
    assert train.images.shape[1:] == (3, 32, 32)
    assert train.images.dtype == torch.uint8
    assert train.labels.dtype == torch.int64


def test_rows_are_planes_of_red_green_and_blue(tmp_path) -> None:
    folder = write_python(tmp_path, "cifar100")
    batch = pickle.loads((folder / "train").read_bytes())
    train, _, _ = read_cifar(tmp_path, "cifar100")
    assert train.images[3, 1, 5, 6] == batch["data"][3, 1024 + 32 * 5 + 6]


def test_files_are_read_again_only_if_they_have_changed(tmp_path, monkeypatch) -> None:
    folder = write_python(tmp_path, "cifar100")
    train, _, _ = read_cifar(tmp_path, "cifar100")
    with monkeypatch.context() as patch:
        patch.setattr("deepmoe.data.cifar.load_plain_pickle", lambda *_: pytest.fail("read again"))
        assert read_cifar(tmp_path, "cifar100")[0] is train
    batch = pickle.loads((folder / "train").read_bytes())
    batch["data"][0] = 7
    (folder / "train").write_bytes(pickle.dumps(batch))
    assert (read_cifar(tmp_path, "cifar100")[0].images[0] == 7).all()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_that_were_saved_anew(protocol: int, tmp_path) -> None:
    folder = write_python(tmp_path, "cifar10")
    expected = read_cifar(tmp_path, "cifar10")
    for path in folder.iterdir():
        batch = pickle.loads(path.read_bytes())
        if "labels" in batch:
            batch["labels"] = np.array(batch["labels"])
        bytes_keys = {key.encode(): value for key, value in batch.items()}
        path.write_bytes(pickle.dumps(bytes_keys, protocol=protocol))
    again = read_cifar(tmp_path, "cifar10")
    assert torch.equal(again[0].images, expected[0].images)
    assert torch.equal(again[0].labels, expected[0].labels)
    assert again[2] == expected[2]


@pytest.mark.parametrize("cut", [1, 1000, 40000])
@pytest.mark.parametrize("write", [write_python, write_binary])
def test_truncated_files_are_named(write, cut: int, tmp_path) -> None:
    folder = write(tmp_path, "cifar10")
    path = next(p for p in sorted(folder.iterdir()) if p.name.startswith("data_batch_3"))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UserError, match=r"data_batch_3.* is truncated or not a CIFAR file"):
        read_cifar(tmp_path, "cifar10")


def test_files_cut_between_two_images_are_named(tmp_path) -> None:
    path = write_binary(tmp_path, "cifar10") / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[: 10 * 3073])
    with pytest.raises(
        UserError, match=r"data_batch_2.bin is truncated: it has 10 images instead of 20"
    ):
        read_cifar(tmp_path, "cifar10")
    path = write_binary(tmp_path, "cifar100", per_file=1001) / "train.bin"
    with pytest.raises(
        UserError, match=r"train.bin is truncated: it has 1001 images instead of 50000"
    ):
        read_cifar(tmp_path, "cifar100")


def test_class_names_differ_and_can_be_printed(tmp_path) -> None:
    path = write_python(tmp_path, "cifar10") / "batches.meta"
    for odd in ("class1", b"class1", "", "two\nlines", b"\x1b[2J"):
        names = [odd, *(f"class{i}" for i in range(1, 10))]
        path.write_bytes(pickle.dumps({"label_names": names}))
        with pytest.raises(UserError, match="does not give each class a name of its own"):
            read_cifar(tmp_path, "cifar10")


@pytest.mark.parametrize("names", [5, "abcdefghij", {}, [["a"]] * 10, None])
def test_odd_class_names_are_named(names: object, tmp_path) -> None:
    folder = write_python(tmp_path, "cifar10")
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    with pytest.raises(UserError, match="no list of class names"):
        read_cifar(tmp_path, "cifar10")


def test_missing_folders_and_files_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_cifar(tmp_path / "nowhere", "cifar10")
    with pytest.raises(UserError, match="is not a folder"):
        read_cifar(Path(__file__), "cifar10")
    with pytest.raises(UserError, match="has no cifar10: looked for cifar-10-batches-py or"):
        read_cifar(tmp_path, "cifar10")
    folder = write_python(tmp_path, "cifar10")
    (folder / "data_batch_4").unlink()
    with pytest.raises(UserError, match=r"cannot read .*data_batch_4"):
        read_cifar(tmp_path, "cifar10")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "holds a list, no dict"),
        ({"labels": [0]}, "no uint8 array named data"),
        ({"data": np.zeros((1, 7), np.uint8), "labels": [0]}, "shape"),
        ({"data": np.zeros((1, PIXELS), np.uint8)}, "no numbers named labels"),
        ({"data": np.zeros((1, PIXELS), np.uint8), "labels": [[1], [2, 3]]}, "no numbers named"),
        ({"data": np.zeros((1, PIXELS), np.uint8), "labels": [False]}, "no numbers named"),
        ({"data": np.zeros((1, PIXELS), np.uint8), "labels": [2**63 - 1]}, "labels from 9223"),
        ({"data": np.zeros((1, PIXELS), np.uint8), "labels": [0, 1]}, "1 images but 2 labels"),
        ({"data": np.zeros((1, PIXELS), np.uint8), "labels": [10]}, "labels from 10 to 10"),
        ({"data": np.zeros((1, PIXELS), np.int64), "labels": [0]}, "no uint8 array named data"),
        ({"data": np.zeros((1, PIXELS), np.float32), "labels": [0]}, "refused.*of integers"),
    ],
)
def test_files_that_are_something_else_are_named(batch, message: str, tmp_path) -> None:
    folder = write_python(tmp_path, "cifar10")
    (folder / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(UserError, match=message):
        read_cifar(tmp_path, "cifar10")


def test_other_things_in_place_of_files_are_one_sentence(tmp_path, monkeypatch) -> None:
    path = write_python(tmp_path, "cifar10") / "data_batch_1"
    batch = path.read_bytes()
    path.unlink()
    os.mkfifo(path)  # nobody ever writes into it
    with pytest.raises(UserError, match="data_batch_1: not a regular file"):
        read_cifar(tmp_path, "cifar10")
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="data_batch_1: not a regular file"):
        read_cifar(tmp_path, "cifar10")
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="data_batch_1: Is a directory"):
        read_cifar(tmp_path, "cifar10")
    path.rmdir()
    path.write_bytes(batch)
    monkeypatch.setattr("deepmoe.data.cifar._read_bytes.__defaults__", (len(batch) - 1,))
    with pytest.raises(
        UserError, match=r"data_batch_1: [\d,]+ bytes are more than the [\d,]+ that"
    ):
        read_cifar(tmp_path, "cifar10")


def test_holdout_takes_training_images_evenly_and_leaves_the_test_set_alone(tmp_path) -> None:
    write_python(tmp_path, "cifar10")
    whole = open_data(DataConfig(name="cifar10", root=str(tmp_path)), batch_size=10)
    assert (len(whole.train.split), len(whole.evaluation.split)) == (100, 20)
    assert whole.evaluation_name == "test"
    held = open_data(DataConfig(name="cifar10", root=str(tmp_path), holdout=30), batch_size=10)
    assert (len(held.train.split), len(held.evaluation.split)) == (70, 30)
    assert held.evaluation_name == "holdout"
    assert held.evaluation.split.labels.bincount().tolist() == [3] * 10
    together = torch.cat([held.train.split.images, held.evaluation.split.images]).flatten(1)
    originals = {bytes(row.numpy()) for row in whole.train.split.images.flatten(1)}
    assert {bytes(row.numpy()) for row in together} == originals
    with pytest.raises(UserError, match=r"data.holdout is 100"):
        open_data(DataConfig(name="cifar10", root=str(tmp_path), holdout=100), batch_size=10)
    with pytest.raises(UserError, match="32 px"):
        open_data(DataConfig(name="cifar10", root=str(tmp_path), size=16), batch_size=10)


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "unpack_cifar.py").is_file(), reason="the real CIFAR-100 is absent"
)
def test_the_real_cifar100(tmp_path) -> None:
    command = [sys.executable, SHARED / "unpack_cifar.py", SHARED / "cifar100", tmp_path]
    subprocess.run(command, check=True)
    data = open_data(DataConfig(name="cifar100", root=str(tmp_path)), batch_size=10)
    assert (len(data.train.split), len(data.evaluation.split)) == (50000, 10000)
    assert data.info.classes == 100
    assert data.info.class_names[30] == "dolphin"
    batch = pickle.loads((tmp_path / "cifar-100-python" / "test").read_bytes())
    meta = pickle.loads((tmp_path / "cifar-100-python" / "meta").read_bytes())
    groups = coarse_groups(data.info.class_names)
    for fine, coarse in zip(batch["fine_labels"], batch["coarse_labels"], strict=True):
        assert groups[fine] == meta["coarse_label_names"][coarse].replace("_", " ")
    assert data.train.split.labels.bincount().tolist() == [500] * 100
    # the constants that are commonly published for this data set
    assert data.info.mean == pytest.approx((0.5071, 0.4865, 0.4409), abs=5e-5)
    assert data.info.std == pytest.approx((0.2673, 0.2564, 0.2762), abs=1e-4)
