"""Where a trained model and a data set meet."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepmoe.config import DataConfig
from deepmoe.data import DataInfo, DataSource, open_data
from deepmoe.errors import UserError

MODEL = DataInfo(("cat", "dog", "owl"), (28, 28), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for label, name in enumerate(MODEL.class_names):
            (tmp_path / split / name).mkdir(parents=True)
            pixels = np.full((28, 28, 3), 50 * label, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / name / "0.png")
    return tmp_path


def open_root(root: Path, info: DataInfo) -> DataSource:
    config = DataConfig(name="image-folder", root=str(root), size=28, workers=0)
    return open_data(config, batch_size=2, info=info)


def test_the_classes_of_model_and_data_are_the_same_by_name(root: Path) -> None:
    assert open_root(root, MODEL).info.class_names == MODEL.class_names
    for names, message in {
        ("cat", "dog"): r"the model knows 2 classes, but the data \(image-folder\) has 3",
        ("cat", "cow", "owl"): r"class 1 \(of 0 to 2\) is cow to the model, but dog in the data",
        ("dog", "cat", "owl"): r"class 0 .* is dog to the model, but cat in the data",
    }.items():
        with pytest.raises(UserError, match=message):
            open_root(root, replace(MODEL, class_names=names))
    with pytest.raises(UserError, match="trained for segmentation, but image-folder is for class"):
        open_root(root, replace(MODEL, task="segmentation"))


def test_the_normalisation_is_the_models_own(root: Path) -> None:
    ((images, _),) = open_root(root, MODEL).evaluation
    expected = MODEL.normalise(torch.full((1, 3, 28, 28), 50))
    torch.testing.assert_close(images[1:2], expected)


@pytest.mark.parametrize("names", [(), ("one",), ("one", "one")])
def test_there_are_classes_to_tell_apart(names: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="at least two classes, each with a name of its own"):
        replace(MODEL, class_names=names)
