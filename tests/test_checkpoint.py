import errno
import json
import struct
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from safetensors.torch import load_file, save_file

from deepmoe.checkpoint import TrainState, load_checkpoint, read_progress, save_checkpoint
from deepmoe.configured_models import model_from_config
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.training.model_and_optimizer import make_optimizer

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
    assert header["format_version"] == "3"
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


def test_a_file_that_may_not_be_read_is_not_called_damaged(saved, monkeypatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(UserError, match=r"cannot read checkpoint .*: Permission denied"):
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
        ({"format_version": "4"}, "has format version 4; this deepmoe reads up to version 3"),
        ({"format_version": None}, "format version none"),
        ({"config": "{"}, "damaged header"),
        (
            {"config": '{"model": {"nmae": "vgg16"}}'},
            "damaged header: unknown config key model.nmae",
        ),
        ({"config": "[1]"}, "damaged header"),
        ({"config": "[]"}, "damaged header: the configuration is no table"),
        ({"config": "[" * 100000}, "damaged header"),
        ({"data": "{}"}, "damaged header"),
        ({"data": "[1]"}, "damaged header"),
        ({"data": '{"class_names": [], "size": [8], "mean": [0], "std": [0]}'}, "damaged header"),
        ({"state": '{"epoch": "three"}'}, "damaged header"),
        ({"state": '{"epoch": -5}'}, "damaged header"),
        ({"state": '{"epoch": 50}'}, "no run of 4 epochs can be 50 epochs and 0 batches along"),
        ({"state": '{"epoch": 4, "batch": 1, "sums": [1.0]}'}, "damaged header: no run"),
        ({"state": '{"epoch": 1, "batch": -5}'}, "damaged header: no run"),
        ({"state": '{"epoch": 1, "batch": 1000000000}'}, "damaged header: no run"),
        ({"state": '{"epoch": 1, "batch": 7, "sums": [1.0, 6.0]}'}, "damaged header: no run"),
        ({"state": '{"epoch": 1, "batch": 2, "sums": [NaN, 6.0]}'}, "damaged header: no run"),
        ({"state": '{"epoch": 1, "best": Infinity}'}, "damaged header: no run"),
        ({"state": '{"epoch": 1, "metrics": [{}]}'}, "damaged header: no run"),
        ({"state": '{"epoch": 1, "metrics": [3]}'}, "damaged header"),
        ({"config": '{"model": {"wide": 1e9}}'}, "damaged header: model.wide must lie"),
        ({"config": '{"model": {"wide": 1000}}'}, "does not fit its own model resnet20"),
        ({"config": '{"embedding": {"widths": [100000, 100000]}}'}, "does not fit its own model"),
        ({"config": '{"schema": 9}'}, "damaged header: .*schema 9"),
        ({"checksum": "0" * 64}, "is damaged: its checksum does not match"),
        ({"checksum": None}, "is damaged: its checksum does not match"),
        (
            {"data": '{"class_names": ["a"], "size": [8, 8], "mean": [0, 0, 0], "std": [1, 1, 1]}'},
            "damaged header",
        ),
        (
            {
                "data": '{"class_names": ["a", "b"], "size": [8, 1000000000000], '
                '"mean": [0, 0, 0], "std": [1, 1, 1]}'
            },
            "damaged header: images have at most",
        ),
        ({"config": '{"model": {"name": "vgg16"}}'}, "does not fit its own model vgg16"),
    ],
)
def test_odd_headers_are_named(saved, changes: dict, message: str) -> None:
    header = {k: v for k, v in (header_of(saved) | changes).items() if v is not None}
    save_file(load_file(saved), saved, header)
    with pytest.raises(UserError, match=message):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    "name", ["model.network.fc.weight", "optimizer.momentum_buffer.heads.weight"]
)
@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(10, 64, dtype=torch.float64)])
def test_odd_tensors_are_named(saved, name: str, tensor: torch.Tensor) -> None:
    save_file({**load_file(saved), name: tensor}, saved, header_of(saved))
    with pytest.raises(UserError, match="does not fit its own model resnet20"):
        load_checkpoint(saved)


@pytest.mark.parametrize("place", [-1, -5000, -20000])
def test_a_flipped_bit_is_noticed(saved, place: int) -> None:
    content = bytearray(saved.read_bytes())
    content[place] ^= 1
    saved.write_bytes(content)
    with pytest.raises(UserError, match="checksum does not match"):
        load_checkpoint(saved)


@pytest.mark.parametrize("rows", [60_000, 1])
def test_codes_that_are_not_there_are_not_made_room_for(saved, rows: int, monkeypatch) -> None:
    """A header of a few bytes must not ask for gigabytes."""
    tensors = load_file(saved) | {
        "model.codebook.codes": torch.empty(rows, 0),
        "model.codebook.weight": torch.empty(0),
    }
    save_file(tensors, saved, header_of(saved))
    monkeypatch.setattr("deepmoe.checkpoint.RouteCodebook", None)
    with pytest.raises(UserError, match="does not fit its own model"):
        load_checkpoint(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["heads.weight", "network.fc.bias", "network.bn1.running_var"])
def test_weights_that_are_not_finite_are_refused(tmp_path, name: str, value: float) -> None:
    config = tiny_config()
    model = model_from_config(config, 10)
    model.state_dict()[name].view(-1)[0] = value
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, model, config, INFO, TrainState(3))
    with pytest.raises(UserError, match=f"{name} has values that are not finite"):
        load_checkpoint(path)


@pytest.mark.parametrize("vote", [-0.1, 1.5])
def test_a_vote_that_is_no_share_is_refused(tmp_path, vote: float) -> None:
    config, path = tiny_config(), tmp_path / "model.safetensors"
    model = model_from_config(config, 10)
    model.exit_at, model.exit_vote = torch.tensor(0.5), torch.tensor(vote)
    save_checkpoint(path, model, config, INFO, TrainState(3))
    with pytest.raises(UserError, match="exit_vote is not from 0 to 1"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("exit_at", "words"),
    [(-0.01, "exit_at is negative"), (float("nan"), "not finite"), (float("inf"), "not finite")],
)
def test_a_threshold_of_exits_that_means_nothing_is_refused(
    tmp_path, exit_at: float, words: str
) -> None:
    config, path = tiny_config(), tmp_path / "model.safetensors"
    model = model_from_config(config, 10)
    model.exit_at = torch.tensor(exit_at)
    save_checkpoint(path, model, config, INFO, TrainState(3))
    with pytest.raises(UserError, match=words):
        load_checkpoint(path)


@pytest.mark.parametrize("exit_at", [0.0, 1.0, 2.0])
def test_thresholds_of_all_images_and_of_none_are_read(tmp_path, exit_at: float) -> None:
    """Above 1 the embedding never answers: whoever switches exits off so can keep the model."""
    config, path = tiny_config(), tmp_path / "model.safetensors"
    model = model_from_config(config, 10)
    model.exit_at = torch.tensor(exit_at)
    save_checkpoint(path, model, config, INFO, TrainState(3))
    assert float(load_checkpoint(path).model.exit_at) == exit_at


@pytest.mark.parametrize("double", [False, True])
def test_a_threshold_may_be_set_in_any_precision(tmp_path, double: bool) -> None:
    """A file that could not be read again would have taken the trained weights with it."""
    config = tiny_config(f"train.precision={'64-true' if double else '32-true'}")
    path = tmp_path / "model.safetensors"
    model = model_from_config(config, 10)
    model = model.double() if double else model
    for exit_at in (torch.tensor(0.5), torch.tensor(0.5).double(), torch.tensor([0.5])):
        model.exit_at, model.exit_vote = exit_at, exit_at / 2
        save_checkpoint(path, model, config, INFO, TrainState(3))
        loaded = load_checkpoint(path).model
        assert (float(loaded.exit_at), float(loaded.exit_vote)) == (0.5, 0.25)
    before = path.read_bytes()
    model.exit_at = torch.tensor([0.5, 0.6])
    with pytest.raises(UserError, match="exit_at is one number for all images, not 2"):
        save_checkpoint(path, model, config, INFO, TrainState(3))
    assert path.read_bytes() == before


def test_a_model_in_half_precision_replaces_no_checkpoint(tmp_path) -> None:
    """It could not be read again. In single precision, it has the exits that it had."""
    config, path = tiny_config(), tmp_path / "model.safetensors"
    model = model_from_config(config, 10)
    model.exit_at = torch.tensor(0.9871)
    save_checkpoint(path, model.bfloat16().float(), config, INFO, TrainState(3))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"not torch\.bfloat16: call \.float\(\)"):
        save_checkpoint(path, model.bfloat16(), config, INFO, TrainState(3))
    assert path.read_bytes() == before
    assert load_checkpoint(path).model.exit_at == torch.tensor(0.9871)


def test_a_model_whose_exits_are_switched_off_is_saved_without_a_vote(tmp_path) -> None:
    config, path = tiny_config(), tmp_path / "model.safetensors"
    model = model_from_config(config, 10)
    model.exit_vote = torch.tensor(0.3)
    save_checkpoint(path, model, config, INFO, TrainState(3))
    assert load_checkpoint(path).model.exit_vote is None


def test_a_vote_without_exits_does_not_fit(saved) -> None:
    save_file({**load_file(saved), "model.exit_vote": torch.tensor(0.5)}, saved, header_of(saved))
    with pytest.raises(UserError, match="does not fit its own model"):
        load_checkpoint(saved)


OLD = {version: Path(__file__).parent / f"version{version}" for version in (1, 2)}
REFUSED = OLD[1] / "resnet.safetensors"
OLD_FILES = [p for folder in OLD.values() for p in sorted(folder.glob("*.safetensors"))]
OLD_FILES.remove(REFUSED)


@pytest.mark.parametrize("path", OLD_FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_checkpoints_of_earlier_versions_give_what_they_gave(path: Path, tmp_path) -> None:
    assert header_of(path)["format_version"] == path.parent.name.removeprefix("version")
    expected = torch.tensor(json.loads((path.parent / "logits.json").read_text())[path.stem])
    images = torch.linspace(-2, 2, 2 * 3 * 1024).view(2, 3, 32, 32).sin()
    loaded = load_checkpoint(path)
    assert loaded.state.epoch == 3 and loaded.state.best == 0.5
    logits = loaded.model(loaded.model.as_input(images)).logits
    torch.testing.assert_close(logits.float(), expected, rtol=1e-4, atol=1e-4)
    # Saved again, it is of the present version.
    save_checkpoint(tmp_path / "now", loaded.model, loaded.config, loaded.info, loaded.state)
    assert header_of(tmp_path / "now")["format_version"] == "3"
    again = load_checkpoint(tmp_path / "now")
    assert torch.equal(again.model(again.model.as_input(images)).logits, logits)


def test_optimiser_state_of_version_2_finds_its_parameters() -> None:
    loaded = load_checkpoint(OLD[2] / "vgg16.safetensors")
    assert loaded.model.codebook is not None
    parameters = dict(loaded.model.named_parameters())
    assert loaded.optimizer_state.keys() == parameters.keys()
    for name, state in loaded.optimizer_state.items():  # the file was made so
        assert torch.equal(state["momentum_buffer"], 2 * parameters[name]), name


def test_gates_that_stood_elsewhere_are_refused() -> None:
    with pytest.raises(UserError, match=r"resnet.safetensors can't be used: .* train .* again$"):
        load_checkpoint(REFUSED)
    config, state = read_progress(REFUSED)  # what it is of can still be told
    assert config.model.gates == "all" and state.epoch == 3


@pytest.mark.parametrize("path", [OLD[2] / "vgg16.safetensors", OLD[2] / "resnet18.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "renamed", "now"])
def test_damaged_files_of_version_2_are_named(path: Path, damage: str, tmp_path) -> None:
    tensors, header = load_file(path), header_of(path)
    if damage == "flipped":
        tensors["model.heads.weight"][0, 0] += 1e-3
    elif damage == "renamed":
        tensors["model.backbone.other"] = tensors.pop("model.heads.weight")
    else:  # names of old in a file that claims to be of today
        header["format_version"] = "3"
    save_file(tensors, tmp_path / "damaged", header)
    words = "checksum does not match" if damage == "flipped" else "does not fit its own model"
    with pytest.raises(UserError, match=words):
        load_checkpoint(tmp_path / "damaged")


def test_a_run_of_version_1_with_settings_that_are_gone_can_not_go_on() -> None:
    assert read_progress(OLD[1] / "gated.safetensors")[1].epoch == 3
    with pytest.raises(UserError, match=r"heads\.revive = 0\.1 was removed"):
        read_progress(OLD[1] / "random_threshold.safetensors")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:nonsense", 1.5, [1], "xpu"])
def test_a_device_that_is_not_there_is_named(saved, device: object) -> None:
    with pytest.raises(UserError, match=r"^(no device here is called|the device is cuda:99, but)"):
        load_checkpoint(saved, device)
