"""Networks of other packages by name: in Python, in a configuration, on the command line."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from third_party import timm, torchvision_models, transformers

import deepmoe
from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import RunConfig, load_config
from deepmoe.configured_models import config_of, model_from_config
from deepmoe.costs import count_costs
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.registry import create_model

FACTORY = """
from pathlib import Path
from torch import nn

Path(__file__).with_name("imported").touch()


class Small(nn.Sequential):
    def __init__(self, classes=7):
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))
        convs = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1))
        super().__init__(*convs, nn.BatchNorm2d(16), nn.ReLU(), *head)


def small_of_seven():
    return Small()


def number():
    return 3


def broken():
    raise RuntimeError("no\\nsuch luck")


def unfit():
    raise RuntimeError("operator torchvision::nms does not exist")


constant = 5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder to work in, with a module that tells when it is imported."""
    (tmp_path / "house.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "house", raising=False)
    yield tmp_path
    sys.modules.pop("house", None)


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def assert_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


# By Python, TOML and the command line.


def tiny_folder(tmp_path: Path) -> str:
    """A configuration of Hugging Face without weights, as one downloads it."""
    config = transformers().ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    config.architectures = ["ResNetForImageClassification"]
    config.save_pretrained(tmp_path / "tiny")
    return f"hf:{tmp_path / 'tiny'}"


def named(kind: str, tmp_path: Path) -> tuple[str, int]:
    """A name, and how many classes the network has of its own."""
    if kind == "torchvision":
        torchvision_models()
        return "torchvision:squeezenet1_1", 1000
    if kind == "timm":
        timm()
        return "timm:test_resnet", 1000
    if kind == "hf":
        return tiny_folder(tmp_path), 4
    return "house:Small", 7


KINDS = ["torchvision", "timm", "hf", "factory"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_name_means_the_same_everywhere(kind: str, folder) -> None:
    name, classes = named(kind, folder)
    model = create_model(name, size=(64, 64))
    assert model.classes == classes
    assert model.gated
    assert model.source.name == name

    (folder / "run.toml").write_text(f'[model]\nname = "{name}"\n')
    of_file = model_from_config(load_config(folder / "run.toml"), classes, size=(64, 64))
    assert of_file.gating.names == model.gating.names
    assert of_file.gating.widths == model.gating.widths

    costs = count_costs(model, 64)
    for verb in ("macs", "describe"):
        result = cli(verb, name, "--input", 64, "--json")
        assert result.exit_code == 0, result.output
        values = json.loads(result.stdout)
        assert (values["model"], values["classes"]) == (name, classes)
        assert (values["macs"], values["params"]) == (costs.macs, costs.params)


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_classes_gets_a_new_head(kind: str, folder) -> None:
    name, _ = named(kind, folder)
    model = create_model(name, classes=3, size=(64, 64)).eval()
    assert model.classes == 3
    assert model(torch.randn(2, 3, 64, 64)).logits.shape == (2, 3)


def test_a_trained_head_that_is_replaced_is_told_of() -> None:
    network = deepmoe.create_model("resnet20", classes=5).network
    body = network.layer1[0].conv1.weight
    with pytest.warns(UserWarning, match="'fc' gave 5 classes; a new one for 3 starts untrained"):
        model = deepmoe.gate(network, torch.randn(2, 3, 32, 32), classes=3)
    assert model.classes == 3
    assert model.network.layer1[0].conv1.weight is body


def test_weights_of_a_folder_are_read(folder) -> None:
    name = tiny_folder(folder)
    made = transformers().ResNetForImageClassification(
        transformers().AutoConfig.from_pretrained(folder / "tiny")
    )
    made.save_pretrained(folder / "tiny")
    model = create_model(name, size=(64, 64), pretrained=True)
    for key, tensor in made.state_dict().items():
        assert torch.equal(model.network.state_dict()[key], tensor), key
    with pytest.warns(UserWarning, match="gave 4 classes; a new one for 6"):
        assert create_model(name, classes=6, size=(64, 64), pretrained=True).classes == 6


def test_a_factory_without_arguments_gets_its_head_replaced(folder) -> None:
    assert create_model("house:small_of_seven", classes=3, size=(16, 16)).classes == 3
    assert create_model("house:small_of_seven", size=(16, 16)).classes == 7


def test_a_network_by_name_can_be_trained(folder) -> None:
    settings = ["model.name=house:Small", "data.size=8", "embedding.widths=[4, 8]"]
    settings += ["train.epochs=1", "train.finetune_epochs=1", "train.batch_size=512"]
    arguments = [a for setting in settings for a in ("--set", setting)]
    result = cli("train", "quickstart", "--out", "run", *arguments)
    assert result.exit_code == 0, result.output
    assert_refused(cli("eval", "run/last.safetensors"), "--network house:Small")
    result = cli("eval", "run/last.safetensors", "--network", "house:Small", "--json")
    assert result.exit_code == 0, result.output
    assert 0 < json.loads(result.stdout)["accuracy"] <= 1


# What is refused.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:make", ["nowhere:make needs nowhere, which is not installed"]),
        ("house:missing", ["house has no function or class 'missing'"]),
        ("house:constant", ["house has no function or class 'constant'"]),
        ("house:number", ["house:number gives a int", "torch.nn.Module"]),
        ("house:broken", ["house:broken can't be made: RuntimeError: no"]),
        ("house:unfit", ["torchvision does not fit torch", "install both again"]),
        ("house:", ["names no network", "package.module:factory"]),
        (":Small", ["names no network"]),
        ("house:Small; import os", ["names no network"]),
        ("../house:Small", ["names no network"]),
        ("hf:./no/such/folder", ["hf:./no/such/folder can't be made"]),
        ("timm:", ["timm"]),
        ("timm:resnet5000", ["timm has no model named 'resnet5000'"]),
        ("torchvision:resnet5000", ["torchvision has no model named 'resnet5000'"]),
    ],
)
def test_names_that_stand_for_nothing(name: str, words: list[str], folder) -> None:
    timm()
    transformers()
    with pytest.raises(UserError) as raised:
        create_model(name)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)
    assert_refused(cli("describe", name), *words)


@pytest.mark.parametrize("package", ["timm", "torchvision", "transformers"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch) -> None:
    source = "hf" if package == "transformers" else package
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # what stands for its absence
    with pytest.raises(UserError, match=f"{source}:resnet18 needs {package}") as raised:
        create_model(f"{source}:resnet18")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("classes", [0, 1, -2])
def test_numbers_of_classes_that_make_no_sense(classes: int, folder) -> None:
    with pytest.raises(UserError, match="classes"):
        create_model("house:small_of_seven", classes=classes, size=(16, 16))


def test_options_of_the_zoo_do_not_apply(folder) -> None:
    with pytest.raises(UserError, match="house:Small takes no options of the zoo, such as wide"):
        create_model("house:Small", wide=2)
    assert_refused(cli("describe", "house:Small", "--wide", 2), "wide")
    with pytest.raises(UserError, match="resnet20 has no trained weights"):
        create_model("resnet20", pretrained=True)


# Nothing is imported that was not named.


def python(code: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return result.stdout


def test_the_zoo_imports_no_other_package(tmp_path) -> None:
    code = """
        import sys, deepmoe, torch
        model = deepmoe.create_model("resnet20", classes=5)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
        network.extend([torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 5)])
        deepmoe.gate(network, torch.randn(2, 3, 16, 16))
        others = ("timm", "transformers", "torchvision", "huggingface_hub", "onnx")
        print([name for name in others if name in sys.modules])
    """
    assert python(code, tmp_path).strip() == "[]"


INFO = DataInfo(tuple("abcdefg"), (16, 16), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.fixture
def saved(folder) -> Path:
    """A checkpoint of a stranger, who names a module that we happen to have."""
    model = create_model("house:Small", classes=7, size=(16, 16))
    torch.nn.init.uniform_(model.heads.weight, -0.5, 1)
    save_checkpoint("model.safetensors", model, config_of(model), INFO, TrainState(1))
    torch.save(model.eval()(torch.ones(1, 3, 16, 16)).logits, "logits.pt")
    (folder / "imported").unlink()
    del sys.modules["house"]
    return folder / "model.safetensors"


def test_a_checkpoint_imports_nothing_by_itself(saved) -> None:
    with pytest.raises(UserError, match="network='house:Small'") as raised:
        load_checkpoint(saved)
    assert "\n" not in str(raised.value)
    assert_refused(cli("eval", saved), "--network house:Small")
    with pytest.raises(UserError, match="house:Small"):
        load_checkpoint(saved, network="house:small_of_seven")
    started = cli("train", "quickstart", "--out", "run", "--set", f"train.start={saved}")
    assert started.exit_code == 2, started.output
    assert "house" not in sys.modules
    assert not saved.with_name("imported").exists()


@pytest.mark.parametrize("given", ["name", "module"])
def test_a_checkpoint_of_a_named_network_is_read(saved, given: str) -> None:
    network = "house:Small"
    if given == "module":
        network = create_model("house:Small", size=(16, 16)).network
    loaded = load_checkpoint(saved, network=network)
    logits = loaded.model(torch.ones(1, 3, 16, 16)).logits
    assert torch.equal(logits, torch.load("logits.pt"))
    assert loaded.model.source.name == "house:Small"


def test_the_wrong_module_for_a_checkpoint_is_refused(saved) -> None:
    wrong = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.Conv2d(4, 4, 3),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 7),
    )
    with pytest.raises(UserError, match="does not fit") as raised:
        load_checkpoint(saved, network=wrong)
    assert "\n" not in str(raised.value)


def test_a_checkpoint_of_a_given_module_asks_for_one_like_it(folder) -> None:
    sys.path.append(str(folder))
    from house import Small

    model = deepmoe.gate(Small(), torch.randn(2, 3, 16, 16)).eval()
    save_checkpoint("given.safetensors", model, config_of(model, RunConfig()), INFO, TrainState(1))
    with pytest.raises(UserError, match="network=module"):
        load_checkpoint("given.safetensors")
    fresh = Small()
    before = fresh[0].weight.clone()
    loaded = load_checkpoint("given.safetensors", network=fresh).model
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert torch.equal(fresh[0].weight, before)  # what was given stays as it was


def test_a_torchvision_that_was_built_for_another_torch_is_no_obstacle(tmp_path) -> None:
    (tmp_path / "torchvision.py").write_text(
        "import torch\n"
        "for name in ('nms', 'qnms'):\n"
        "    torch.library.register_fake(f'torchvision::{name}')(lambda *boxes: boxes)\n"
    )
    (tmp_path / "timm.py").write_text(
        "import torchvision\nfrom torch import nn\n"
        "def is_model(name):\n    return name == 'small'\n"
        "def create_model(name, pretrained):\n"
        "    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)]\n"
        "    pooling = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]\n"
        "    return nn.Sequential(*layers, *pooling)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "deepmoe", "describe", "timm:small"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    told = [line for line in result.stderr.splitlines() if "torchvision" in line]
    assert len(told) == 1 and "its networks work" in told[0]
