"""The measurement of exits runs, and says what it measured."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import randomise_statistics, tiny_config

from deepmoe.bench import exits
from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.configured_models import model_from_config
from deepmoe.data import open_data
from deepmoe.errors import UserError
from deepmoe.evaluation import evaluate
from deepmoe.evaluation.batches import EvenlySpread
from deepmoe.model import DeepMoE, confidence
from deepmoe.registry import create_model

HEADS = ("model.gates=inner", "model.gates=none")
IMAGES = 360  # of the digits' test set


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr(exits, "MOST_WARM_UP", 4)


def checkpoint(folder: Path, *overrides: str, answers: bool = True) -> Path:
    """An untrained model whose embedding answers a third of the digits, or none."""
    config = tiny_config("model.exits=true", "train.device=cpu", *overrides)
    data = open_data(config.data, batch_size=256)
    model = randomise_statistics(model_from_config(config, data.info.classes)).eval()
    if answers:
        model.exit_at = answers_a_third(model, torch.cat([x for x, _ in data.evaluation]))
    path = folder / "model.safetensors"
    save_checkpoint(path, model, config, data.info, TrainState())
    return path


@torch.no_grad()
def answers_a_third(model: DeepMoE, images: torch.Tensor) -> torch.Tensor:
    return confidence(model.embedding(images)[1]).quantile(2 / 3)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("gates", HEADS)
def test_with_and_without_exits(tmp_path: Path, gates: str) -> None:
    path, saved = checkpoint(tmp_path, gates), tmp_path / "figures.json"
    settings = ("--batch", "1,64", "--images", 150, "--threads", 1, "--device", "cpu")
    one, many = json.loads(run("bench", "exits", path, *settings, "--json", "--save", saved))
    assert (one["batch"], one["images"]) == (1, 150)
    assert (many["batch"], many["images"]) == (64, 128)  # whole batches
    for values in (one, many):
        assert 0.1 < values["exited"] < 0.6 and values["threads"] == 1
        assert values["ratio"] == pytest.approx(values["ms"] / values["ms_without"])
        for end in ("", "_without"):
            assert 0 <= values[f"accuracy{end}"] <= 1 and values[f"ms{end}"] > 0
            speed = 1e3 * values["batch"] / values[f"ms{end}"]
            assert values[f"images_per_second{end}"] == pytest.approx(speed)
    written = json.loads(saved.read_text())
    assert written["values"] == [one, many]
    command = "bench exits model.safetensors --batch 1,64 --images 150 --threads 1 --device cpu"
    assert command in written["command"]


def test_accuracies_are_those_of_the_model(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, HEADS[1])
    threads = torch.get_num_threads()
    (values,) = json.loads(run("bench", "exits", path, "--batch", 60, "--threads", 2, "--json"))
    plain, sparse = (json.loads(run("eval", path, "--json", *o)) for o in ((), ("--sparse",)))
    assert values["images"] == plain["images"] == IMAGES
    for result in (plain, sparse):
        assert values["exited"] == pytest.approx(result["exited"]) == pytest.approx(1 / 3, abs=0.01)
        assert values["accuracy"] == pytest.approx(result["accuracy"])
        assert result["macs"] == pytest.approx(plain["macs"])
    assert torch.get_num_threads() == threads


def test_some_of_the_images_are_of_all_classes(tmp_path: Path) -> None:
    """Files lie sorted by class, and the first class may be an easy one."""
    path = checkpoint(tmp_path, HEADS[1])
    opened = load_checkpoint(path)
    data = open_data(opened.config.data, batch_size=256, info=opened.info).evaluation
    (values,) = json.loads(run("bench", "exits", path, "--batch", 6, "--images", 36, "--json"))
    spread = evaluate(opened.model, EvenlySpread(data, 36))
    ((x, labels), *_) = data
    first = evaluate(opened.model, [(x[:36], labels[:36])])
    assert values["images"] == 36 and first.exited != spread.exited
    assert values["exited"] == pytest.approx(spread.exited)


def test_a_table_for_people(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, HEADS[0])
    printed = run("bench", "exits", path, "--batch", 90)
    sentence, *_ = printed.splitlines()
    assert re.match(r"without exits [\d.]+ ms, with exits [\d.]+ ms: .+; accuracy ", sentence)
    assert "360 test images" in printed and "images/s; cpu, float32" in printed
    assert printed.endswith(f"next: deepmoe export {path}\n")
    assert "images_per_second: " not in printed
    assert "images_per_second: " in run("bench", "exits", path, "--batch", 90, "--details")


@pytest.mark.parametrize("gates", HEADS)
def test_a_checkpoint_with_exits_among_the_ways_to_skip_channels(
    tmp_path: Path, gates: str
) -> None:
    options = ("--batch", 30, "--rounds", 1, "--device", "cpu", "--no-compile")
    path = checkpoint(tmp_path, gates)
    values = json.loads(run("bench", "sparse", path, *options, "--json"))
    assert 0 <= values["max_error"] <= 1e-4 and values["rerouted"] == 0
    assert 0 < values["exited"] < 1
    assert ("presliced_ms" in values) == (gates == HEADS[0])
    assert "% exited" in run("bench", "sparse", path, *options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "0"), "--batch must be at least 1"),
        (("--images", "0"), "--images must be at least 1"),
        (("--threads", "-1"), "--threads must be at least 1"),
        (("--threads", "1000000"), "threads on this machine, not 1000000"),
        (("--save", "MODEL"), "holds something else"),
        (
            ("--batch", "64", "--images", "63"),
            "there are only 63 images: --batch can be at most 63",
        ),
        (("--set", "train.lr=1"), "--set can change only data"),
    ],
)
def test_mistakes_get_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    path = checkpoint(tmp_path, HEADS[1])
    named = [str(path) if word == "MODEL" else word for word in arguments]
    result = CliRunner().invoke(main, ["bench", "exits", str(path), *named])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("gates", HEADS)
def test_a_model_without_exits_is_refused(tmp_path: Path, gates: str) -> None:
    path = checkpoint(tmp_path, gates, answers=False)
    result = CliRunner().invoke(main, ["bench", "exits", str(path)])
    assert result.exit_code == 2 and "has no exits" in result.stderr
    with pytest.raises(UserError, match="has no exits"):
        exits.bench_exits(create_model("resnet20"), [], batch=1)
