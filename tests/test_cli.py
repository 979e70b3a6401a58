import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import click
import pytest
import torch
from cifar_files import write_binary, write_python
from click.testing import CliRunner, Result
from helpers import TINY_RUN
from PIL import Image
from safetensors.torch import save_file

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import load_config
from deepmoe.console import print_table
from deepmoe.registry import list_models
from deepmoe.training.log import read_metrics

QUICK = [arg for item in TINY_RUN for arg in ("--set", item)]


def deepmoe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def assert_refused(result: Result, *words: str) -> None:
    """One clear sentence on stderr, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    result = deepmoe("train", "quickstart", "--out", out, *QUICK)
    assert result.exit_code == 0, result.output
    assert "epoch 4/4 (finetune): loss" in result.output
    assert "accuracy" in result.output
    return out / "last.safetensors"


def test_train_eval_and_predict_agree(checkpoint, tmp_path) -> None:
    result = deepmoe("eval", checkpoint, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    metrics = read_metrics(checkpoint.parent / "metrics.jsonl")[-1]
    for key in ("accuracy", "macs", "macs_share", "active", "images", "evaluated_on"):
        assert values[key] == metrics[key]
    assert "accuracy" in deepmoe("eval", checkpoint).output

    Image.new("L", (40, 30), 200).save(tmp_path / "grey.png")
    Image.new("RGBA", (8, 8)).save(tmp_path / "colour.png")
    images = [tmp_path / "grey.png", tmp_path / "colour.png"]
    result = deepmoe("predict", checkpoint, *images, "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert first["image"] == str(images[0])
    assert first["label"] in "0123456789"
    assert 0.1 <= first["probability"] <= 1
    assert 0 < second["active"] <= 1
    assert second["macs"] > 0
    assert "grey.png" in deepmoe("predict", checkpoint, *images).output.replace("\n", "")


def test_sparse_evaluation_and_prediction_equal_the_plain_ones(checkpoint, tmp_path) -> None:
    image = tmp_path / "grey.png"
    Image.new("L", (40, 30), 200).save(image)
    for arguments in (("eval", checkpoint), ("predict", checkpoint, image)):
        plain = json.loads(deepmoe(*arguments, "--json").stdout)
        sparse = json.loads(deepmoe(*arguments, "--json", "--sparse").stdout)
        plain, sparse = (v if isinstance(v, dict) else v[0] for v in (plain, sparse))
        assert plain.keys() == sparse.keys()
        for key, value in plain.items():
            if key in ("ms", "top"):
                continue
            expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert sparse[key] == expected


def test_training_can_be_resumed_and_overwritten(checkpoint, tmp_path) -> None:
    assert_refused(deepmoe("train", "quickstart", "--out", checkpoint.parent, *QUICK), "already")
    resumed = deepmoe("train", "quickstart", "--out", checkpoint.parent, "--resume", *QUICK)
    assert resumed.exit_code == 0
    both = deepmoe("train", "quickstart", "--resume", "--overwrite", *QUICK)
    assert_refused(both, "not both")


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


def test_a_run_survives_a_failed_overwrite(checkpoint) -> None:
    content = checkpoint.read_bytes()
    command = ["train", "quickstart", "--out", checkpoint.parent, "--overwrite", *QUICK]
    assert_refused(deepmoe(*command, "--set", "model.name=nope"), "nope")
    assert checkpoint.read_bytes() == content


def test_one_bad_image_does_not_keep_others_from_an_answer(checkpoint, tmp_path) -> None:
    good, bad = tmp_path / "[red]good.png", tmp_path / "bad\x1b[31m\n.png"
    Image.new("L", (8, 8), 200).save(good)
    bad.write_text("not an image")
    missing = tmp_path / "missing.png"
    result = deepmoe("predict", checkpoint, bad, good, missing)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert "[red]good.png" in result.stdout.replace("\n", "")  # no markup
    errors = result.stderr.splitlines()
    assert len(errors) == 2 and all(line.startswith("Error: cannot read image") for line in errors)
    assert "bad\\x1b[31m\\n.png" in errors[0] and "missing.png" in errors[1]
    result = deepmoe("predict", checkpoint, bad, good, missing, "--json")
    first, second, third = json.loads(result.stdout)
    assert result.exit_code == 2 and second["label"] in "0123456789"
    assert first["image"] == str(bad) and "not an image" in first["error"]
    assert "cannot read image" in third["error"]


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


def test_the_command_alone_prints_its_help() -> None:
    for arguments in ((), ("bench",)):
        result = deepmoe(*arguments)
        assert result.exit_code == 0 and result.stdout.startswith("Usage: ")
        assert "Error" not in result.output


def test_summaries_of_verbs_are_not_cut_off() -> None:
    for arguments in ((), ("bench",)):
        assert "..." not in deepmoe(*arguments, "--help").stdout.partition("Commands:")[2]


def verbs_of(group: click.Group, *before: str) -> list[tuple[list[str], click.Command]]:
    """Every verb, with what is typed for it."""
    found = []
    for name, verb in group.commands.items():
        if verb.hidden:  # called by other verbs alone
            continue
        below = verbs_of(verb, *before, name) if isinstance(verb, click.Group) else []
        found += below or [([*before, name], verb)]
    return found


@pytest.mark.parametrize(
    ("typed", "verb"),
    verbs_of(main),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_verb_alone_tells_how_it_is_called(typed, verb) -> None:
    """One line with its usage and an example, which is also at the end of its help."""
    command = " ".join(("deepmoe", *typed))
    assert verb.epilog.startswith(f"Example: {command}")
    assert verb.epilog in " ".join(deepmoe(*typed, "--help").stdout.split())
    if any(isinstance(p, click.Argument) and p.required for p in verb.params):
        refused = deepmoe(*typed)
        assert_refused(refused, " is missing: ", f"{' '.join(typed)} [OPTIONS] ")
        assert f"; for example: {command}" in refused.stderr


@pytest.mark.parametrize(("lines", "seen"), [(1, "drn_a_50_camvid\n"), (0, "")])
def test_a_pipe_into_head_is_quiet(lines: int, seen: str) -> None:
    """Also where it has closed the pipe before anything is printed."""
    command = f"{sys.executable} -m deepmoe config | head -n {lines}"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout == seen and result.stderr == ""


@pytest.mark.parametrize(
    ("command", "code"), [("config >&-", 0), ("config x 2>&-", 2), ("config <&- >&- 2>&-", 0)]
)
def test_outputs_that_are_closed_from_the_start_get_nothing(command: str, code: int) -> None:
    whole = f"{sys.executable} -m deepmoe {command}"
    result = subprocess.run(whole, shell=True, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_a_batch_size_without_its_learning_rate_gets_a_warning(tmp_path) -> None:
    settings = ["--set", "train.batch_size=128", "--set", "train.device=none"]
    result = deepmoe("train", "quickstart", "--out", tmp_path / "run", *settings[:2], *OFF)
    warning, error = result.stderr.splitlines()
    assert warning == "Warning: train.lr = 0.1 is for batches of 64; for 128, set train.lr=0.2"
    assert error.startswith("Error: ")
    quiet = deepmoe("train", "quickstart", *settings[:2], "--set", "train.lr=0.2", *OFF)
    assert_refused(quiet, "classes")


OFF = ["--set", "model.classes=7"]  # a mistake that is told before anything is trained


def test_quickstart_keeps_a_folder_that_holds_another_run(checkpoint, tmp_path) -> None:
    content = checkpoint.read_bytes()
    refused = deepmoe("quickstart", "--out", checkpoint.parent, *QUICK)
    assert_refused(refused, "holds a run already")
    assert sorted(p.name for p in checkpoint.parent.iterdir() if p.is_dir()) == []
    (tmp_path / "deepmoe").mkdir()
    shutil.copy(checkpoint, tmp_path / "deepmoe")
    assert_refused(deepmoe("quickstart", "--out", tmp_path, *QUICK), "deepmoe holds a run already")
    assert not (tmp_path / "dense").exists()
    assert checkpoint.read_bytes() == content


def test_a_lack_of_memory_gets_one_sentence(monkeypatch) -> None:
    def fail(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1e12 bytes")

    monkeypatch.setattr("deepmoe.configured_models.create_model", fail)
    assert_refused(deepmoe("train", "quickstart", *QUICK), "not enough memory")


def test_images_that_a_model_was_trained_on_are_not_held_out(checkpoint) -> None:
    refused = deepmoe("eval", checkpoint, "--set", "data.holdout=100")
    assert_refused(refused, "trained with data.holdout=0", "data.holdout=100")


def test_a_run_that_can_not_begin_leaves_nothing(tmp_path) -> None:
    command = ["train", "quickstart", "--out", tmp_path / "run", *QUICK]
    assert_refused(deepmoe(*command, "--set", "train.target_macs=0.001"), "can't be met")
    assert not (tmp_path / "run").exists()


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


def test_macs_prints_json() -> None:
    result = deepmoe("macs", "resnet50", "--wide", 2, "--block", "bottleneck-b", "--json")
    values = json.loads(result.stdout)
    assert values["params"] == 41911720
    assert values["input"] == 224
    assert values["classes"] == 1000
    required = "params conv_params macs conv_macs embedding_macs embedding_params gate_params"
    assert values.keys() >= {*required.split(), "input", "classes"}
    options = ["--widths", "w13-all", "--classes", 10, "--input", "64x32", "--json"]
    values = json.loads(deepmoe("macs", "vgg16", *options).stdout)
    assert values["conv_params"] == 24183018
    assert values["conv_macs"] == 2 * 815346684
    assert (values["input"], values["classes"]) == ([64, 32], 10)
    by_list = deepmoe("macs", "vgg11", "--widths", "1,2,3,4,5,6,7,8", "--json")
    assert json.loads(by_list.stdout)["conv_params"] == 9 * (3 + 2 + 6 + 12 + 20 + 30 + 42 + 56)
    assert "25,557,032" in deepmoe("macs", "resnet50").output


def test_models_lists_the_zoo() -> None:
    output = deepmoe("models").output
    assert all(name in output for name in list_models())
    listed = json.loads(deepmoe("models", "--json").stdout)
    assert [m["model"] for m in listed] == list_models()


def test_config_prints_a_preset_that_loads(tmp_path) -> None:
    result = deepmoe("config", "quickstart", "--set", "train.lr=0.5")
    (tmp_path / "mine.toml").write_text(result.stdout)
    assert load_config(tmp_path / "mine.toml") == load_config("quickstart", ["train.lr=0.5"])
    assert "vgg16_cifar100" in deepmoe("config").stdout
    assert (
        "deepmoe train resnet56_cifar100_teacher" in deepmoe("config", "vgg16_cifar100_best").stdout
    )


def test_the_module_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "deepmoe", "train", "quikstart"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: no preset is named 'quikstart'")
    assert "Traceback" not in result.stderr


def test_tables_are_not_wrapped_in_a_log(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "a_run_with_a_name_of_more_than_forty_letters"
    print_table(("run", "accuracy"), [(name, "73.27 %")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name, "73.27", "%"] in lines


def test_tables_have_words_to_the_left_and_figures_to_the_right(capsys) -> None:
    print_table(
        ("run", "by", "loss"), [("a", "Li", "1.5"), ("b", "ThiNet", "-12.0"), ("c", "", "")]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "by", "loss"]
    assert lines[2:] == [" a     Li         1.5", " b     ThiNet   -12.0", " c"]
