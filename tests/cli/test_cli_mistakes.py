"""Mistakes and damage get one sentence and an exit code of 2."""

import json
import os
import subprocess
import zlib

import pytest
import torch
from cifar_files import write_binary, write_python
from command_line import QUICK, assert_refused, deepmoe
from PIL import Image
from safetensors.torch import save_file

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "quikstart"], ["no preset is named 'quikstart'", "quickstart"]),
        (["config", "quikstart"], ["no preset is named 'quikstart'"]),
        (["train", "missing.toml"], ["cannot read preset missing.toml"]),
        (["train", "quickstart", "--set", "train.epoch=1"], ["unknown config key train.epoch"]),
        (["train", "quickstart", "--set", "train.epochs=x"], ["train.epochs", "expected int"]),
        (["train", "quickstart", "--set", "model.name=vgg12"], ["no model is named 'vgg12'"]),
        (["train", "quickstart", "--set", "model.classes=7"], ["model.classes is 7", "10"]),
        (["train", "quickstart", "--set", "heads.init=zeros"], ["gate init", "zeros"]),
        (["train", "vgg16_cifar100", "--set", "data.root=nowhere"], ["nowhere", "not exist"]),
        (["macs", "vgg12"], ["no model is named 'vgg12'"]),
        (["macs", "vgg16", "--widths", "w2"], ["no widths named 'w2'"]),
        (["macs", "vgg16", "--widths", "64,x"], ["--widths"]),
        (["macs", "vgg16", "--widths", "64,64"], ["13 convolutions, but got 2"]),
        (["macs", "vgg16", "--input", "16"], ["at least 32 px"]),
        (["macs", "vgg16", "--input", "big"], ["--input"]),
        (["macs", "vgg16", "--block", "basic"], ["no option 'block'"]),
        (["macs", "vgg16", "--wide", "0"], ["out of range"]),
        (["macs", "vgg16", "--classes", "0"], ["classes"]),
        (["eval", "missing.safetensors"], ["no checkpoint at missing.safetensors"]),
        (
            ["bench", "sparse", "gone.safetensors", "--network", "timm:resnet18"],
            ["no checkpoint at"],
        ),
        (["exits", "missing.safetensors", "--loss", "1", "--out", "x"], ["no checkpoint at"]),
        (["exits", "missing.safetensors", "--loss", "1"], ["--out"]),
        (["exits", "missing.safetensors", "--out", "x"], ["give a loss, such as 0.5, or macs"]),
        (["exits", "m", "--loss", "1", "--out", "/dev/null/x"], ["/dev/null is not a folder"]),
        (["cut", "m", "--macs", "0.5", "--out", "/dev/null/x"], ["/dev/null is not a folder"]),
        (["teach", "m", "--out", "/dev/null/x"], ["/dev/null is not a folder"]),
        (["analyze", "m", "--draws", "9" * 20], ["--draws"]),
        (["export", "."], ["no checkpoint at ."]),
        (["export", "/"], ["no checkpoint at /"]),
        (["predict", "m", "x.png", "--csv", "/"], ["cannot write /: Is a directory"]),
        (["bench", "exits", "m", "--save", "/"], ["cannot write /: Is a directory"]),
        (["teach", "missing.safetensors", "--out", "x"], ["no checkpoint at missing"]),
        (["teach", "--out", "x"], ["CHECKPOINTS"]),
        (["train", "quickstart", "--set", "train.prune=0.5"], ["train.start"]),
        (["predict", "missing.safetensors", "x.png"], ["no checkpoint at"]),
        (["macs", "vgg16", "--wide", "inf"], ["out of range"]),
        (["macs", "vgg16", "--wide", "1e30"], ["out of range"]),
        (["macs", "vgg16", "--wide", "-1"], ["out of range"]),
        (["macs", "vgg16", "--wide", "abc"], ["abc"]),
        (["macs", "vgg16", "--classes", "9" * 30], ["classes"]),
        (["macs", "vgg16", "--input", ""], ["--input"]),
        (["macs", "vgg16", "--bogus"], ["--bogus"]),
        (["macs"], ["MODEL"]),
        (["train"], ["PRESET"]),
        (["train", "quickstart", "--devices", "0"], ["--devices"]),
        (["train", "quickstart", "--set", "model.wide=inf"], ["model.wide"]),
        (["train", "quickstart", "--set", "train.seed=-1"], ["train.seed"]),
        (["train", "quickstart", "--set", "train.batch_size=1"], ["train.batch_size"]),
        (["train", "quickstart", "--set", "loss.sparsity=nan"], ["loss.sparsity"]),
        (["train", "quickstart", "--set", "data.size=0"], ["data.size"]),
        (["train", "quickstart", "--set", "embedding.widths=[]"], ["widths"]),
        (["train", "quickstart", "--out", "/proc/nowhere"], ["cannot write"]),
        (["quickstart", "--set", "model.gates=none"], ["model.gates"]),
        (["eval", "x", "--set", "model.name=vgg16"], ["--set can change only data"]),
    ],
    ids=lambda value: " ".join(value) if value[0] in main.commands else "",
)
def test_mistakes_get_one_sentence_and_code_2(arguments, words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(deepmoe(*arguments), *words)


@pytest.mark.parametrize("write", [write_python, write_binary])
def test_truncated_data_gets_one_sentence_and_code_2(write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path, "cifar100")
    train = next(p for p in folder.iterdir() if p.name.startswith("train"))
    train.write_bytes(train.read_bytes()[:-1234])
    result = deepmoe("train", "vgg16_cifar100", "--set", f"data.root={tmp_path}")
    assert_refused(result, train.name, "truncated")
    assert not (tmp_path / "runs").exists()


def test_bad_checkpoints_get_one_sentence_and_code_2(checkpoint, tmp_path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(checkpoint.read_bytes()[:-100])
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.ones(3)}, foreign)
    for verb, extra in (("eval", []), ("predict", ["x.png"])):
        assert_refused(deepmoe(verb, damaged, *extra), "damaged")
        assert_refused(deepmoe(verb, foreign, *extra), "not a deepmoe checkpoint")
    write_python(tmp_path, "cifar100")
    data = [
        "--set",
        "data.name=cifar100",
        "--set",
        f"data.root={tmp_path}",
        "--set",
        "data.size=32",
    ]
    assert_refused(deepmoe("eval", checkpoint, *data), "knows 10 classes", "has 100")


@pytest.mark.parametrize("verb", ["eval", "predict", "curve", "cut", "exits"])
def test_weights_that_are_not_finite_are_refused(verb, checkpoint, tmp_path) -> None:
    broken, image = tmp_path / "broken.safetensors", tmp_path / "image.png"
    loaded = load_checkpoint(checkpoint)
    loaded.model.network.fc.weight.data[0] = float("nan")
    save_checkpoint(broken, loaded.model, loaded.config, loaded.info, loaded.state)
    Image.new("L", (8, 8), 200).save(image)
    smaller = ["--macs", "0.5", "--out", tmp_path / "smaller"]
    extra = {"predict": [image], "cut": smaller, "exits": smaller}
    assert_refused(deepmoe(verb, broken, *extra.get(verb, [])), "fc.weight", "not finite")


def test_outputs_that_are_not_finite_are_refused(checkpoint, tmp_path) -> None:
    """Finite weights, but too large to compute with."""
    broken, image = tmp_path / "broken.safetensors", tmp_path / "image.png"
    loaded = load_checkpoint(checkpoint)
    loaded.model.network.fc.weight.data.fill_(3e38)
    save_checkpoint(broken, loaded.model, loaded.config, loaded.info, loaded.state)
    Image.new("L", (8, 8), 200).save(image)
    assert_refused(deepmoe("eval", broken), "outputs for 360 images are not finite")
    result = deepmoe("predict", broken, image, "--json")
    assert result.exit_code == 2 and "not finite" in json.loads(result.stdout)[0]["error"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_read_only_file_system_gets_one_sentence(checkpoint, tmp_path) -> None:
    place = tmp_path / "read only"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "small", place]).returncode:
        pytest.skip("this machine does not let us mount a file system")
    try:
        train = deepmoe("train", "quickstart", "--out", place / "run", *QUICK)
        assert_refused(train, "cannot write to", "Read-only file system")
        curve = deepmoe("curve", checkpoint, "--thresholds", "0", "--plot", place / "curve.png")
        assert_refused(curve, "cannot write", "Read-only file system")
        save = deepmoe("curve", checkpoint, "--thresholds", "0", "--save", place / "curve.json")
        assert_refused(save, "cannot write", "is not writable")  # before anything is measured
        cut = deepmoe("cut", checkpoint, "--macs", "0.5", "--out", place / "cut.safetensors")
        assert_refused(cut, "cannot write", "is not writable")
        assert_refused(deepmoe("quickstart", "--out", place / "run", *QUICK), "cannot write to")
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_batch_size_without_its_learning_rate_gets_a_warning(tmp_path) -> None:
    settings = ["--set", "train.batch_size=128", "--set", "train.device=none"]
    result = deepmoe("train", "quickstart", "--out", tmp_path / "run", *settings[:2], *OFF)
    warning, error = result.stderr.splitlines()
    assert warning == "Warning: train.lr = 0.1 is for batches of 64; for 128, set train.lr=0.2"
    assert error.startswith("Error: ")
    quiet = deepmoe("train", "quickstart", *settings[:2], "--set", "train.lr=0.2", *OFF)
    assert_refused(quiet, "classes")


OFF = ["--set", "model.classes=7"]  # a mistake that is told before anything is trained


def test_a_lack_of_memory_gets_one_sentence(monkeypatch) -> None:
    def fail(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1e12 bytes")

    monkeypatch.setattr("deepmoe.configured_models.create_model", fail)
    assert_refused(deepmoe("train", "quickstart", *QUICK), "not enough memory")


def test_images_that_a_model_was_trained_on_are_not_held_out(checkpoint) -> None:
    refused = deepmoe("eval", checkpoint, "--set", "data.holdout=100")
    assert_refused(refused, "trained with data.holdout=0", "data.holdout=100")


def test_an_unknown_verb_gets_one_sentence_and_code_2() -> None:
    assert_refused(deepmoe("bogus"), "bogus")


def test_bad_images_get_one_sentence_and_code_2(checkpoint, tmp_path) -> None:
    assert_refused(deepmoe("predict", checkpoint, tmp_path / "none.png"), "cannot read image")
    (tmp_path / "text.png").write_text("not an image")
    assert_refused(deepmoe("predict", checkpoint, tmp_path / "text.png"), "not an image")
    Image.new("1", (8, 8)).save(tmp_path / "bomb.png")
    bomb = bytearray((tmp_path / "bomb.png").read_bytes())
    bomb[16:24] = (60000).to_bytes(4, "big") * 2  # width and height in the header
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    (tmp_path / "bomb.png").write_bytes(bomb)
    assert_refused(deepmoe("predict", checkpoint, tmp_path / "bomb.png"), "cannot read image")
