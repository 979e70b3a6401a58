import json
import struct
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from safetensors.torch import load_file, save_file

from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.registry import model_from_config
from deepmoe.training import load_checkpoint, save_checkpoint
from deepmoe.training.state import TrainState
from deepmoe.training.trainer import make_optimizer

INFO = DataInfo(tuple("0123456789"), (8, 8), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.fixture
def saved(tmp_path) -> Path:
    config = tiny_config()
    model = model_from_config(config, 10)
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, model, config, INFO, TrainState(3))
    return path


def header_of(path: Path) -> dict[str, str]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length])["__metadata__"]


def test_the_header_tells_format_version_and_configuration(saved) -> None:
    header = header_of(saved)
    assert header["format"] == "deepmoe"
    assert header["format_version"] == "1"
    assert json.loads(header["config"])["model"]["name"] == "resnet20"
    loaded = load_checkpoint(saved)
    assert (loaded.config, loaded.info, loaded.state) == (tiny_config(), INFO, TrainState(3))


def test_optimiser_state_is_kept_by_parameter_name(tmp_path) -> None:
    config = tiny_config()
    model = model_from_config(config, 10)
    optimizer = make_optimizer(model, config)
    model(torch.randn(2, 3, 8, 8)).logits.sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", model, config, INFO, TrainState(1), optimizer=optimizer)
    state = load_checkpoint(tmp_path / "c").optimizer_state
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected = optimizer.state[parameter]["momentum_buffer"]
            assert torch.equal(state[name]["momentum_buffer"], expected)
    assert state.keys() == {n for n, p in model.named_parameters() if p.grad is not None}


def test_no_draft_is_left_behind(saved) -> None:
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_damaged_files_are_named(saved, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(UserError, match="is damaged, or not a safetensors file"):
        load_checkpoint(saved)


def test_foreign_files_are_named(saved, tmp_path) -> None:
    with pytest.raises(UserError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "missing.safetensors")
    with pytest.raises(UserError, match="no checkpoint at"):
        load_checkpoint(tmp_path)
    torch.save({"weight": torch.ones(3)}, tmp_path / "pickle.pt")
    with pytest.raises(UserError, match="not a safetensors file"):
        load_checkpoint(tmp_path / "pickle.pt")
    save_file({"weight": torch.ones(3)}, tmp_path / "foreign.safetensors")
    with pytest.raises(UserError, match="but not a deepmoe checkpoint"):
        load_checkpoint(tmp_path / "foreign.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": "2"}, "has format version 2; this deepmoe reads version 1"),
        ({"format_version": None}, "format version none"),
        ({"config": "{"}, "damaged header"),
        (
            {"config": '{"model": {"nmae": "vgg16"}}'},
            "damaged header: unknown config key model.nmae",
        ),
        ({"config": "[1]"}, "damaged header: the configuration is a table"),
        ({"config": "[" * 100000}, "damaged header"),
        ({"data": "{}"}, "damaged header"),
        ({"data": "[1]"}, "damaged header"),
        ({"data": '{"class_names": [], "size": [8], "mean": [0], "std": [0]}'}, "damaged header"),
        ({"state": '{"epoch": "three"}'}, "damaged header"),
        ({"state": '{"epoch": -5}'}, "damaged header"),
        ({"state": '{"epoch": 50}'}, "damaged header: 50 finished epochs of 4"),
        ({"config": '{"model": {"name": "vgg16"}}'}, "does not fit its own model vgg16"),
    ],
)
def test_odd_headers_are_named(saved, changes: dict, message: str) -> None:
    header = {k: v for k, v in (header_of(saved) | changes).items() if v is not None}
    save_file(load_file(saved), saved, header)
    with pytest.raises(UserError, match=message):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    "name", ["model.backbone.fc.weight", "optimizer.momentum_buffer.heads.weight"]
)
@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(10, 64, dtype=torch.float64)])
def test_odd_tensors_are_named(saved, name: str, tensor: torch.Tensor) -> None:
    save_file({**load_file(saved), name: tensor}, saved, header_of(saved))
    with pytest.raises(UserError, match="does not fit its own model resnet20"):
        load_checkpoint(saved)
