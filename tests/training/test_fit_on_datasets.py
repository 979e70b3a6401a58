"""Training of networks of one's own, on datasets of one's own."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import deepmoe
from deepmoe.config import EmbeddingConfig, RunConfig, apply_overrides
from deepmoe.data import DataInfo, open_data
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.evaluation import predict
from deepmoe.model import DeepMoE
from deepmoe.training.trainer import Trainer

CLASSES = 4
NARROW = EmbeddingConfig(widths=(4, 8))
CONFIG = apply_overrides(
    RunConfig(), ["train.epochs=4", "train.batch_size=32", "train.lr=0.05", "data.workers=0"]
)


def network(colours: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(colours, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def data(items: int = 160, colours: int = 3) -> TensorDataset:
    """Brighter images are of higher classes."""
    generator = torch.Generator().manual_seed(items)
    labels = torch.arange(items) % CLASSES
    images = torch.randn(items, colours, 16, 16, generator=generator)
    return TensorDataset(images + labels[:, None, None, None] * 0.7 - 1, labels)


class Noisy(Dataset):
    """Changes its images by all generators that there are."""

    classes = ("a", "b", "c", "d")

    def __init__(self, pairs: TensorDataset) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.pairs[index]
        shift = 0.1 * (random.random() + np.random.rand() + float(torch.rand(())))
        return image + shift, int(label)


def gated(colours: int = 3) -> DeepMoE:
    made = network(colours)
    return deepmoe.gate(made, torch.randn(2, colours, 16, 16), embedding=NARROW)


def test_a_network_learns_within_its_budget_and_is_loaded_again(tmp_path) -> None:
    config = apply_overrides(CONFIG, ["train.target_macs=0.5", "train.epochs=6"])
    model = gated()
    result = deepmoe.fit(model, data(320), data(64), config, tmp_path, quiet=True)
    assert result.model is model
    assert result.evaluation.accuracy > 0.9
    assert result.evaluation.macs_share == pytest.approx(0.5, rel=0.1)
    assert result.data.evaluation_name == "validation"
    x = data(8)[:][0]
    for made in (network(), "test_fit_on_datasets:network"):
        loaded = deepmoe.load_checkpoint(result.checkpoint, network=made)
        assert torch.equal(loaded.model(x).logits, model(x).logits)
    with pytest.raises(UserError, match="give one like it"):
        deepmoe.load_checkpoint(result.checkpoint)
    assert loaded.info.class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_goes_on_to_the_same_weights(workers, tmp_path, monkeypatch) -> None:
    config = apply_overrides(CONFIG, [f"data.workers={workers}"])
    whole = deepmoe.fit(gated(), Noisy(data()), data(64), config, tmp_path / "whole", quiet=True)

    train_epoch, calls = Trainer._after_batch, []

    def interrupted(self, *arguments):
        calls.append(0)
        if len(calls) == 7:  # in the middle of the second epoch
            self.closed = "stopped here"
        return train_epoch(self, *arguments)

    monkeypatch.setattr(Trainer, "_after_batch", interrupted)
    with pytest.raises(TrainingInterrupted):
        deepmoe.fit(gated(), Noisy(data()), data(64), config, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    parts = deepmoe.fit(
        gated(), Noisy(data()), data(64), config, tmp_path / "parts", resume=True, quiet=True
    )
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name]), name
    assert parts.data.info.class_names == Noisy.classes


def test_a_network_of_the_zoo_needs_no_second_one_to_be_loaded(tmp_path) -> None:
    model = deepmoe.create_model("resnet20", classes=CLASSES, widths=[8] * 9)
    config = apply_overrides(CONFIG, ["train.epochs=1"])
    result = deepmoe.fit(model, data(), data(64), config, tmp_path, quiet=True)
    loaded = deepmoe.load_checkpoint(result.checkpoint).model
    x = data(8)[:][0]
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_a_run_starts_from_another_of_the_same_network(tmp_path) -> None:
    config = apply_overrides(CONFIG, ["train.epochs=1"])
    first = deepmoe.fit(gated(), data(), data(64), config, tmp_path / "first", quiet=True)
    start = f'train.start="{first.checkpoint}"'
    taught = [f'train.teacher="{first.checkpoint}"', "loss.distillation=0.5"]
    config = apply_overrides(config, [start, *taught])
    deepmoe.fit(gated(), data(), data(64), config, tmp_path / "second", quiet=True)


def test_images_of_one_colour(tmp_path) -> None:
    config = apply_overrides(CONFIG, ["train.epochs=1"])
    model = gated(1)
    deepmoe.fit(model, data(colours=1), data(64, 1), config, tmp_path, quiet=True)


def test_predict_wants_to_know_how_images_were_normalised(tmp_path) -> None:
    config = apply_overrides(CONFIG, ["train.epochs=1"])
    image = tmp_path / "image.png"
    Image.new("RGB", (20, 20), "red").save(image)
    for info in (None, DataInfo(("a", "b", "c", "d"), (16, 16), (0.5,) * 3, (0.2,) * 3)):
        out = tmp_path / str(info is None)
        result = deepmoe.fit(gated(), data(), data(64), config, out, info=info, quiet=True)
        loaded = deepmoe.load_checkpoint(result.checkpoint, network=network())
        if info is None:
            with pytest.raises(UserError, match="how images are normalised"):
                predict(loaded, [image])
        else:
            (answer,) = predict(loaded, [image])
            assert answer.label in info.class_names


class Endless(IterableDataset):
    def __iter__(self):
        yield from data()


class Unreadable(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index % 2:
            raise OSError("no such file")
        return super().__getitem__(index)


BYTES = TensorDataset(torch.zeros(8, 3, 16, 16, dtype=torch.uint8), torch.zeros(8).long())
OTHER_SIZES = [(torch.randn(3, 16, 16 + i), 0) for i in range(8)]


@pytest.mark.parametrize(
    ("train", "validation", "words"),
    [
        (
            Endless(),
            data(),
            "the training data must be a map-style dataset, not a Endless without numbered items",
        ),
        (data(), Endless(), "the validation data must be a map-style dataset"),
        (Subset(data(), []), data(), "the training data is empty"),
        (BYTES, data(), "normalised float tensors"),
        ([(1, 2)], data(), "its image is a int"),
        (TensorDataset(torch.randn(8, 3, 16, 16)), data(), "not a pair of image and label"),
        (OTHER_SIZES, data(), r"its image has shape \(3, 16, ..\), not \(3, 16, 16\)"),
        ([(torch.randn(3, 16, 16), 4)] * 8, data(), "its label is 4, not from 0 to 3"),
        ([(torch.randn(3, 16, 16), 0.5)] * 8, data(), "label is neither a whole number"),
        (data(64, 1), data(), r"its image has shape \(1, 16, 16\), not \(3, 16, 16\)"),
        (Unreadable(data()), data(), "no such file"),
    ],
)
def test_data_that_can_not_be_used_is_told(train, validation, words, tmp_path) -> None:
    with pytest.raises(UserError, match=words) as raised:
        deepmoe.fit(gated(), train, validation, CONFIG, tmp_path, quiet=True)
    assert "\n" not in str(raised.value)


def test_wrong_arguments_are_told(tmp_path) -> None:
    with pytest.raises(UserError, match=r"deepmoe\.gate"):
        deepmoe.fit(network(), data(), data(), CONFIG, tmp_path)
    with pytest.raises(UserError, match="wrong arguments"):
        deepmoe.fit(gated(), data(), CONFIG)
    with pytest.raises(UserError, match="RunConfig"):
        deepmoe.fit(gated(), data(), data(), {"train": {}}, tmp_path)
    with pytest.raises(UserError, match="not int"):
        deepmoe.fit(3, tmp_path)
    deepmoe.fit(gated(), data(), data(64), CONFIG, tmp_path, quiet=True)
    with pytest.raises(UserError, match="holds a run already"):
        deepmoe.fit(gated(), data(), data(64), CONFIG, tmp_path, quiet=True)
    with pytest.raises(UserError, match="given as torch datasets"):
        open_data(apply_overrides(CONFIG, ["data.name=given"]).data, batch_size=2)
