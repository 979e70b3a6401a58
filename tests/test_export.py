"""Exported files give what the model gives, in the runtime that they are for."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from helpers import randomise_statistics, slow, tiny_config
from pair_files import open_pairs, write_pairs
from torch import Tensor, nn

from deepmoe.building import gate
from deepmoe.checkpoint import Checkpoint, TrainState, load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import EmbeddingConfig
from deepmoe.configured_models import config_of, model_from_config
from deepmoe.data import DataSource, open_data
from deepmoe.errors import UserError
from deepmoe.export import export_checkpoint, exporting, formats
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE, confidence

VGG = ("model.name=vgg11", "model.widths=[4, 4, 4, 8, 8, 8, 8, 8]", "data.size=32")
KEPT = [2, 3, 1, 4, 2, 2, 3, 1, 4]  # of the four channels of each group


@pytest.fixture(autouse=True)
def _few_images(monkeypatch) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(exporting, "CHECKED_IMAGES", 12)


def make(*overrides: str) -> tuple[Checkpoint, DataSource]:
    """An untrained model, and the digits."""
    config = tiny_config("train.device=cpu", *overrides)
    data = open_data(config.data, batch_size=64)
    model = randomise_statistics(model_from_config(config, data.info.classes, size=data.info.size))
    return Checkpoint(model.eval(), config, data.info, TrainState(), {}), data


def one_route(model: DeepMoE) -> None:
    """Gates that differ by channel, half of them closed, and not by image."""
    weight = model.heads.weight.data
    weight.copy_((torch.rand(len(weight), 1) + 0.5) * (torch.rand(len(weight), 1) < 0.5))


def two_codes(model: DeepMoE, images: Tensor) -> None:
    nn.init.normal_(model.heads.weight)
    nn.init.normal_(model.embedding.project.weight, std=10.0)  # so that images differ
    routes = torch.cat(model.heads(model.embedding(images)[0]), dim=1).unique(dim=0)[:2]
    model.codebook = RouteCodebook(routes, torch.ones(routes.shape[1]), model.gating.widths)


def half_exit(model: DeepMoE, images: Tensor) -> None:
    model.exit_at = confidence(model.embedding(images)[1]).median() + 1e-5


def far_apart(model: DeepMoE, images: Tensor) -> None:
    model.centroids.copy_(model.embedding(images[:2]))
    nn.init.normal_(model.network[1].classifier.bias)  # experts differ


CASES: dict[str, tuple[tuple[str, ...], tuple[Callable, ...], str]] = {
    "static, vgg": (VGG, (one_route,), "most images run, for all images"),
    "codes": (VGG, (two_codes,), "a network for each of 2 codes"),
    "pruned, resnet": (("model.gates=none", f"model.kept={KEPT}"), (), "that pruning has left"),
    "experts": ((*VGG, "model.gates=none", "model.experts=2"), (far_apart,), "2 experts"),
    "exits": (
        (*VGG, "model.gates=none", "model.exits=true"),
        (half_exit,),
        "all channels, behind exits",
    ),
}


@pytest.mark.parametrize(
    "case", [slow(c) if c in ("codes", "pruned, resnet") else c for c in CASES]
)
@torch.no_grad()
def test_onnx_runtime_gives_what_the_model_gives(case: str, tmp_path: Path) -> None:
    import onnxruntime

    overrides, changes, told = CASES[case]
    loaded, data = make(*overrides)
    images = next(iter(data.evaluation))[0][:12]
    for change in changes:
        change(loaded.model, *([images] if change is not one_route else []))
    path = tmp_path / "model.onnx"
    result = export_checkpoint(loaded, path, data=data)
    assert told in str(result) and result.max_error <= 1e-4
    assert result.agreement == 1 and (result.images, result.checked_on) == (12, "test")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (given,), (gives,) = session.get_inputs(), session.get_outputs()
    assert (given.name, gives.name) == ("images", "logits")
    assert {given.name: list(given.shape)} == result.inputs
    expected = loaded.model(images).logits
    together = given.shape[0] == "batch"
    assert together == (
        case in ("static, vgg", "pruned, resnet")
    )  # what runs is the same for all images
    found = [
        session.run(None, {"images": x.numpy()})[0] for x in images.split(12 if together else 1)
    ]
    error = (torch.cat([torch.from_numpy(f) for f in found]) - expected).abs().max()
    assert error <= 1e-4 * expected.abs().max()
    assert result.ratio == result.ms / result.dense_runtime_ms  # in ONNX Runtime, both of them
    notes = json.loads(session.get_modelmeta().custom_metadata_map["deepmoe"])
    assert notes["classes"] == list(loaded.info.class_names) and notes["std"]
    if together:  # the savings are in it
        assert result.parameters < 0.75 * result.dense_parameters


@torch.no_grad()
def test_a_file_for_pytorch_tells_of_itself(tmp_path: Path) -> None:
    loaded, _ = make("model.gates=none", f"model.kept={KEPT}")
    result = export_checkpoint(loaded, tmp_path / "model.pt2", format="torch-export")
    exported, images = torch.export.load(tmp_path / "model.pt2").module(), torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(exported(images), loaded.model(images).logits)
    values = json.loads(json.dumps(result.as_dict()))
    assert values["ratio"] == pytest.approx(values["ms"] / values["dense_ms"])
    assert values["inputs"] == {"images": ["batch", 3, 8, 8]} and values["checked_on"] == "random"
    times = [bar.get_width() for bar in result.plot().axes[0].patches]
    assert times == pytest.approx([result.dense_ms, result.ms])
    assert str(result).startswith(f"in {result.runtime}: dense ") and f"written: {tmp_path}" in str(
        result
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.ms = 0


@torch.no_grad()
def test_a_segmentation_is_exported_for_one_size(tmp_path: Path) -> None:
    data = open_pairs(write_pairs(tmp_path / "data"), crop=(24, 40))
    pixels = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    network = nn.Sequential(*pixels, nn.Conv2d(16, 5, 1))
    model = gate(network, torch.randn(1, 3, 24, 40), embedding=EmbeddingConfig(widths=(4, 4)))
    loaded = Checkpoint(model, config_of(model), data.info, TrainState(), {})
    one_route(model)
    path, size = tmp_path / "model.pt2", (16, 32)
    result = export_checkpoint(loaded, path, format="torch-export", data=data, size=size)
    assert result.outputs == {"logits": ["batch", 5, 16, 32]} and result.agreement > 0.999
    images, exported = torch.randn(3, 3, 16, 32), torch.export.load(path).module()
    expected = loaded.model(images).logits
    assert (exported(images) - expected).abs().max() <= 1e-4 * expected.abs().max()


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def saved(folder: Path, loaded: Checkpoint) -> Path:
    path = folder / "a model.safetensors"
    save_checkpoint(path, loaded.model, loaded.config, loaded.info, loaded.state)
    return path


def test_the_verb_finds_codes_and_ends_with_what_to_type(tmp_path: Path) -> None:
    loaded, data = make(*VGG)
    two_codes(loaded.model, next(iter(data.evaluation))[0][:12])
    loaded.model.codebook = None
    path = saved(tmp_path, loaded)
    done = export(path, "--codes", 2, "--format", "torch-export")
    assert done.exit_code == 0, done.output
    assert "a network for each of 2 codes" in done.stdout
    assert f"torch.export.load('{path.with_suffix('.pt2')}')" in done.stdout.splitlines()[-1]
    again = export(path, "--codes", 2, "--format", "torch-export")
    assert again.exit_code == 2 and "already exists" in again.stderr


def test_what_can_not_be_exported_is_refused_in_one_sentence(tmp_path: Path, monkeypatch) -> None:
    loaded, data = make()
    two_codes(loaded.model, next(iter(data.evaluation))[0][:12])
    loaded.model.codebook = None
    path = saved(tmp_path, loaded)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("deepmoe.export.networks.ALIKE", 1.01)  # no image is as good as that
    (tmp_path / "folder").mkdir()
    for arguments, words in (
        ((path,), ["images differ in the channels", "--codes 4"]),
        ((path, "--route", "codes"), ["has no codes", "train.codes"]),
        ((path, "--route", "static", "--codes", 2), ["--codes goes with"]),
        ((path, "--codes", 0), ["from 1 to 64"]),
        ((path, "--out", tmp_path / "folder"), ["already exists"]),
        ((path, "--out", path / "model.onnx"), ["is not a folder"]),
        ((path, "--input", 10**12), ["--input takes pixels"]),
        ((path, "--set", "data.root=x", "--set", "data.name=cifar10"), ["x"]),
        ((path, "--set", "model.name=vgg16"), ["--set can change only data"]),
        ((tmp_path / "missing",), ["no checkpoint at"]),
    ):
        refused = export(*arguments)
        assert refused.exit_code == 2, refused.output
        assert len(refused.stderr.splitlines()) == 1, refused.stderr
        assert all(word in refused.stderr for word in words), refused.stderr
    (tmp_path / "folder").rmdir()
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.setattr("deepmoe.extras.find_spec", lambda name: None)
    assert "pip install 'deepmoe[onnx]'" in export(path).stderr


@pytest.mark.parametrize(
    ("kind", "words"), [("fbs", "while the network runs"), ("scale", "scaling factors")]
)
def test_gates_that_are_not_known_before_are_refused(kind: str, words: str, tmp_path) -> None:
    loaded, data = make(f"heads.kind={kind}")
    with pytest.raises(UserError, match=words):
        export_checkpoint(loaded, tmp_path / "model.onnx", data=data)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_that_was_not_checked(tmp_path: Path, monkeypatch) -> None:
    loaded, _ = make("model.gates=none")
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match="nothing was written"):
        export_checkpoint(loaded, tmp_path / "model.pt2", format="torch-export")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(formats, "as_bytes", lambda *_: b"not what a runtime reads")
    with pytest.raises(UserError, match="can't read the exported network, so nothing was written"):
        export_checkpoint(loaded, tmp_path / "model.pt2", format="torch-export")
    assert list(tmp_path.iterdir()) == []
    assert load_checkpoint(saved(tmp_path, loaded)).model.gated is False
