"""Verbs do what they say, agree with each other, and leave alone what is there."""

import json
import shutil

import pytest
from command_line import QUICK, assert_refused, deepmoe
from PIL import Image

from deepmoe.config import load_config
from deepmoe.registry import list_models
from deepmoe.training.log import read_metrics


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


def test_training_can_be_resumed_and_overwritten(copied, tmp_path) -> None:
    assert_refused(deepmoe("train", "quickstart", "--out", copied.parent, *QUICK), "already")
    resumed = deepmoe("train", "quickstart", "--out", copied.parent, "--resume", *QUICK)
    assert resumed.exit_code == 0
    both = deepmoe("train", "quickstart", "--resume", "--overwrite", *QUICK)
    assert_refused(both, "not both")


def test_a_run_survives_a_failed_overwrite(copied) -> None:
    content = copied.read_bytes()
    command = ["train", "quickstart", "--out", copied.parent, "--overwrite", *QUICK]
    assert_refused(deepmoe(*command, "--set", "model.name=nope"), "nope")
    assert copied.read_bytes() == content


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


def test_quickstart_keeps_a_folder_that_holds_another_run(copied, tmp_path) -> None:
    content = copied.read_bytes()
    refused = deepmoe("quickstart", "--out", copied.parent, *QUICK)
    assert_refused(refused, "holds a run already")
    assert sorted(p.name for p in copied.parent.iterdir() if p.is_dir()) == []
    (tmp_path / "deepmoe").mkdir()
    shutil.copy(copied, tmp_path / "deepmoe")
    assert_refused(deepmoe("quickstart", "--out", tmp_path, *QUICK), "deepmoe holds a run already")
    assert not (tmp_path / "dense").exists()
    assert copied.read_bytes() == content


def test_a_run_that_can_not_begin_leaves_nothing(tmp_path) -> None:
    command = ["train", "quickstart", "--out", tmp_path / "run", *QUICK]
    assert_refused(deepmoe(*command, "--set", "train.target_macs=0.001"), "can't be met")
    assert not (tmp_path / "run").exists()


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
