"""The verb `deepmoe exits`: what it writes and tells, and mistakes in calling it."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cifar_files import write_python
from click.testing import CliRunner, Result
from helpers import tiny_config
from pair_files import open_pairs, write_pairs
from PIL import Image

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import apply_overrides
from deepmoe.costs import count_costs
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model
from deepmoe.training import fit

HELD_OUT = ("data.holdout=300", "train.epochs=2", "train.finetune_epochs=0", "train.batch_size=32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("model.gates=none", "model.exits=true", *HELD_OUT)
    return fit(config, tmp_path_factory.mktemp("trained"), quiet=True).checkpoint


def deepmoe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def json_of(*arguments: object) -> dict:
    done = deepmoe(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def as_checkpoint(trained: Path, path: Path, *settings: str) -> Path:
    """The trained checkpoint, with other settings written into it."""
    loaded = load_checkpoint(trained)
    config = apply_overrides(loaded.config, settings)
    save_checkpoint(path, loaded.model, config, loaded.info, loaded.state)
    return path


def without_embedding(trained: Path, path: Path) -> Path:
    loaded = load_checkpoint(trained)
    dense = DeepMoE(None, None, loaded.model.network, loaded.model.gating)
    config = apply_overrides(loaded.config, ["model.exits=false"])
    save_checkpoint(path, dense, config, loaded.info, loaded.state)
    return path


def assert_refused(result: Result, *words: str) -> None:
    """One clear sentence on stderr, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "asked", [("--macs", 0.6), ("--loss", 3), ("--loss", 5, "--guarantee", 0.9)], ids=str
)
def test_the_verb_writes_a_checkpoint_that_others_read(
    asked: tuple, trained: Path, tmp_path: Path
) -> None:
    out, image = tmp_path / "exits.safetensors", tmp_path / "grey.png"
    figures = json_of("exits", trained, *asked, "--out", out)
    assert (figures["images"], figures["fitted_on"]) == (300, "holdout")
    assert 0.05 < figures["exited"] <= 1
    assert figures["guarantee"] == (0.9 if "--guarantee" in asked else None)
    if "--macs" in asked:
        assert figures["macs_share"] <= 0.6 < figures["macs_share_without"] == 1
    else:
        assert figures["loss"] <= asked[1] / 100 + 1e-9
    told = json_of("eval", out)
    for key in ("exited", "accuracy", "macs", "macs_share", "images"):
        assert told[key] == pytest.approx(figures[key])
    assert json_of("eval", out, "--sparse")["exited"] == pytest.approx(figures["exited"])
    on_test = json_of("eval", out, "--set", "data.holdout=0")
    assert on_test["evaluated_on"] == "test" and on_test["images"] == 360
    assert 0 < on_test["exited"] <= 1
    Image.new("L", (8, 8), 200).save(image)
    (answer,) = json_of("predict", out, image)
    loaded = load_checkpoint(out)
    assert loaded.config.model.exits and float(loaded.model.exit_at) == figures["threshold"]
    costs = count_costs(loaded.model, 8)
    early = answer["answered_by"] == "embedding"
    assert answer["macs"] == costs.embedding_macs + (0 if early else costs.macs)


def test_the_verb_tells_what_was_found(trained: Path, tmp_path: Path) -> None:
    plain = deepmoe("exits", trained, "--macs", 0.6, "--out", tmp_path / "a")
    assert plain.exit_code == 0, plain.output
    assert "fitted on 300 images (holdout)" in plain.output and "certified" not in plain.output
    assert "(one standard error); --guarantee bounds the loss" in plain.output
    sure = deepmoe("exits", trained, "--loss", 5, "--guarantee", 0.9, "--out", tmp_path / "b")
    assert "with probability 0.9, accuracy falls by at most 5 points" in sure.output


def test_a_gated_model_in_double_precision_gets_exits(tmp_path: Path) -> None:
    config = tiny_config(*HELD_OUT, "train.precision=64-true")
    run = fit(config, tmp_path / "run", quiet=True)
    whole = run.evaluation.macs_share
    out = tmp_path / "exits.safetensors"
    figures = json_of("exits", run.checkpoint, "--macs", 0.7 * whole, "--out", out)
    assert figures["macs_share"] <= 0.7 * whole < figures["macs_share_without"]
    told = json_of("eval", out)
    for key in ("exited", "accuracy", "macs"):
        assert told[key] == pytest.approx(figures[key])
    assert load_checkpoint(out).model.exit_at.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a loss, such as 0.5, or macs"),
        (["--loss", 1, "--macs", 0.5], "give a loss, such as 0.5, or macs"),
        (["--macs", 0.5, "--guarantee", 0.95], "give a loss with it"),
        (["--macs", 0.001], "can't bring the cost to 0.001"),
        (["--loss", 0.1, "--guarantee", 0.99], "are needed"),
        (["--loss", 1e-6, "--guarantee", 0.9], "are needed"),
        (["--loss", 1e-300, "--guarantee", 0.9], "(1e-06 or more), not at 1e-300"),
        (["--loss", 1, "--set", "train.lr=1"], "--set can change only data"),
        (["--loss", 1, "--set", "data.holdout=200"], "data.holdout=300"),
        # The test set is none to choose a threshold on, wherever it lies.
        (["--loss", 1, "--set", "data.holdout=0"], "not on the test set"),
        (["--loss", 1, "--set", "data.holdout=0", "--set", "data.root=x"], "not on the test"),
        (["--loss", 1, "--set", "data.holdout=0", "--set", "data.name=digits"], "not on the test"),
    ],
    ids=str,
)
def test_mistakes_get_one_sentence(
    arguments: list, words: str, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    assert_refused(deepmoe("exits", trained, *arguments, "--out", out), words)
    assert not out.exists()


def test_the_test_set_is_none_to_fit_on_for_a_model_of_unknown_data(
    trained: Path, tmp_path: Path
) -> None:
    """Such as one that was saved for the hub."""
    path = as_checkpoint(trained, tmp_path / "given", "data.name=given", "data.holdout=0")
    asked = ("exits", path, "--macs", 0.6, "--set", "data.name=digits", "--set", "data.size=8")
    assert_refused(deepmoe(*asked, "--out", tmp_path / "out"), "not on the test set")
    held_out = deepmoe(*asked, "--set", "data.holdout=300", "--out", tmp_path / "out")
    assert held_out.exit_code == 0, held_out.output


def test_the_test_set_of_a_folder_is_none_to_fit_on_however_it_is_named(
    trained: Path, tmp_path: Path, monkeypatch
) -> None:
    for part, word in itertools.product(("mine", "other"), ("train", "val")):
        for label in range(10):
            folder = tmp_path / part / word / str(label)
            folder.mkdir(parents=True)
            for image in range(2):
                Image.new("RGB", (8, 8), (20 * label, 5 * image, 0)).save(folder / f"{image}.png")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    folder = ("data.name=image-folder", "data.root=mine", "data.size=8", "data.workers=0")
    path = as_checkpoint(trained, tmp_path / "folder.safetensors", *folder, "data.holdout=10")
    asked = ("exits", path, "--macs", 0.5, "--out", "out.safetensors", "--set", "data.holdout=0")
    for same in ("mine", "./mine/", tmp_path / "mine", "link"):
        assert_refused(deepmoe(*asked, "--set", f"data.root={same}"), "not on the test set")
    # Another one may be named. (Nothing was learnt of these images.)
    refused = deepmoe(*asked, "--set", "data.root=other")
    assert_refused(refused, "no better than guessing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, p: as_checkpoint(t, p, "data.holdout=0"), "train it with data.holdout"),
        (lambda t, p: as_checkpoint(t, p, "loss.embedding=0"), "never trained to classify"),
        (
            lambda t, p: as_checkpoint(t, p, "loss.embedding=[[0, 0.0], [2, 0.0]]"),
            "never trained to classify",
        ),
        (without_embedding, "no embedding that could answer"),
    ],
    ids=["no holdout", "mu 0", "a schedule of 0", "dense"],
)
def test_models_without_an_answer_get_one_sentence(
    change: Callable[[Path, Path], Path], words: str, trained: Path, tmp_path: Path
) -> None:
    path, out = change(trained, tmp_path / "changed.safetensors"), tmp_path / "out.safetensors"
    assert_refused(deepmoe("exits", path, "--loss", 1, "--out", out), words)
    assert not out.exists()


def test_an_embedding_may_have_been_taught_for_a_while(trained: Path, tmp_path: Path) -> None:
    path = as_checkpoint(trained, tmp_path / "a", "loss.embedding=[[0, 1.0], [2, 0.0]]")
    done = deepmoe("exits", path, "--loss", 3, "--out", tmp_path / "b")
    assert done.exit_code == 0, done.output


def test_other_data_and_tasks_and_files_in_the_way_get_one_sentence(
    trained: Path, tmp_path: Path
) -> None:
    assert_refused(deepmoe("exits", trained, "--loss", 1, "--out", trained), "already exists")
    write_python(tmp_path, "cifar100")
    other = [f"data.root={tmp_path}", "data.name=cifar100", "data.size=32", "data.holdout=0"]
    settings = [arg for item in other for arg in ("--set", item)]
    out = tmp_path / "out.safetensors"
    refused = deepmoe("exits", trained, "--loss", 1, "--out", out, *settings)
    assert_refused(refused, "knows 10 classes", "has 100")

    data = open_pairs(write_pairs(tmp_path / "pairs"))
    config = tiny_config(
        "model.name=drn_a_50",
        "model.widths=[4, 4, 4, 4]",
        "data.name=segmentation-pairs",
        f"data.root={tmp_path / 'pairs'}",
        "data.workers=0",
    )
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, widths=None, wide=0.05)
    )
    model = create_model(
        "drn_a_50", classes=data.info.classes, wide=0.05, embedding=config.embedding
    )
    path = tmp_path / "segments.safetensors"
    save_checkpoint(path, model, config, data.info, TrainState())
    refused = deepmoe("exits", path, "--loss", 1, "--out", out)
    assert_refused(refused, "segmentation has no exits")
    assert not out.exists()
