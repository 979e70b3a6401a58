"""What a comparison refuses, or can not measure, is told in one sentence."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from small_comparison import METHODS, run

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.compare import method_named
from deepmoe.comparison import open_comparison, rows_of, run_comparison
from deepmoe.errors import UserError
from deepmoe.training.lessons import teach_from


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("li",), "give --start, the checkpoint of a trained dense network, or --preset"),
        (("lii", "--preset", "PRESET"), "no method is named 'lii'"),
        (("li", "--preset", "PRESET", "--macs", "0.001"), "can't leave 0.001 of the MACs"),
        (("li", "--preset", "PRESET", "--macs", "1.5"), "shares of the dense MACs"),
        (("li", "--preset", "PRESET", "--seeds", "0,0"), "--seeds names 0 twice"),
        (("li", "--preset", "PRESET", "--macs", "0.5,0.6,0.5"), "--macs names 0.5 twice"),
        (("li", "--preset", "PRESET", "--model", "vgg16"), "the network is resnet20, not vgg16"),
        (("li", "--preset", "PRESET", "--setting", "vgg16-a"), "a setting of vgg16, not of"),
        (("li", "--preset", "PRESET", "--setting", "x", "--macs", "0.5"), "leave out --macs"),
        (
            ("li", "--preset", "PRESET", "--set", "heads.kind=fbs"),
            "heads.kind is up to the methods",
        ),
        (
            ("li", "--start", "START", "--set", "train.prune=0.3"),
            "train.prune is up to the methods",
        ),
        (("li", "--start", "START", "--set", "heads={spread=5.0}"), "heads are up to the methods"),
        (("li", "--start", "START", "--set", "loss={balance=0.3}"), "loss.balance is up to the"),
        (("li", "--preset", "PRESET", "--network", "a:b"), "a preset names its own"),
        (("li", "all", "--preset", "PRESET"), "give all or list alone"),
        (("li", "--start", "START", "--teacher", "OTHER"), "images that are held out here"),
        (("ours-exits", "--preset", "PRESET", "--macs", "1"), "--macs are below 1"),
        (("rnp", "--preset", "PRESET", "--macs", "0.1"), "rnp can't come down to 0.1"),
        (("he", "--preset", "PRESET", "--setting", "vgg16-a"), "it is for li and li-greedy"),
        (("li", "--preset", "PRESET", "--start", "START"), "and not both"),
        (("li", "--start", "GATED"), "methods start from a dense network"),
        (("li", "--start", "SMALL"), "pruned already: methods start from the whole network"),
        (("li", "--start", "START", "--set", "model.wide=2"), "model... can't change it"),
        (("li", "--start", "START", "--teacher", "missing"), "no checkpoint at missing"),
        (("li", "--start", "START", "--set", "data.name=cifar10"), "images of 32 px"),
        (("ours-exits", "--preset", "PRESET", "--set", "data.holdout=0"), "that were held out"),
        (("li", "--preset", "PRESET", "--no-train"), "holds no finished run of these methods"),
        (("li", "--preset", "PRESET", "--ray", "127.0.0.1:1"), "no Ray cluster can be reached"),
    ],
)
def test_mistakes_are_told_in_one_sentence_before_any_work(
    arguments: tuple[str, ...],
    words: str,
    compared: Path,
    preset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--ray" in arguments:
        pytest.importorskip("ray")
        monkeypatch.setattr("deepmoe.sweep.on_ray.CONNECT_SECONDS", 0.1)
    other = tmp_path / "other.safetensors"
    if "OTHER" in arguments:  # as if it had been trained on all images
        loaded = load_checkpoint(compared / "start-seed0" / "last.safetensors")
        data = dataclasses.replace(loaded.config.data, holdout=0)
        config = dataclasses.replace(loaded.config, data=data)
        save_checkpoint(other, loaded.model, config, loaded.info, loaded.state)
    places = {
        "OTHER": str(other),
        "PRESET": str(preset),
        "START": str(compared / "start-seed0" / "last.safetensors"),
        "SMALL": str(compared / "slimming-60-seed0" / "last.safetensors"),
        "GATED": str(compared / "ours-exits-60-seed0" / "exits.safetensors"),
    }
    result = run(*(places.get(a, a) for a in arguments), "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and words in lines[0], result.stderr
    assert not list(tmp_path.glob("out/*/last.safetensors"))
    assert "--no-train" not in arguments or not (tmp_path / "out").exists()


def test_a_folder_of_other_settings_is_refused(copied: Path, preset: Path) -> None:
    """Also where only the start was trained with them."""
    options = ("--macs", "0.6", "--out", copied)
    for methods, other in ((METHODS, "train.epochs=2"), (("li", "he"), "data.holdout=200")):
        result = run(*methods, "--preset", preset, *options, "--set", other)
        assert result.exit_code == 2
        assert "was trained with other settings: give another --out" in result.stderr
    assert not (copied / "li_he.json").exists()


def test_a_folder_of_another_start_is_refused(compared: Path, preset: Path, tmp_path: Path) -> None:
    """Also where the file has the same name."""
    start = tmp_path / "start.safetensors"
    loaded = load_checkpoint(compared / "start-seed0" / "last.safetensors")
    save_checkpoint(start, loaded.model, loaded.config, loaded.info, loaded.state)
    options = ("li", "--start", start, "--macs", "0.7", "--out", tmp_path / "out", "--json")
    first = run(*options, "--latency-images", 0)
    assert first.exit_code == 0 and len(json.loads(first.stdout)) == 2  # nothing but JSON
    with torch.no_grad():
        next(loaded.model.parameters()).mul_(2)
    save_checkpoint(start, loaded.model, loaded.config, loaded.info, loaded.state)
    result = run(*options, "--latency-images", 0)
    assert result.exit_code == 2
    assert "another start or teacher: give another --out" in result.stderr
    (tmp_path / "out" / "inputs.json").write_text("{")
    result = run(*options, "--latency-images", 0)
    assert result.exit_code == 2 and "inputs.json is damaged" in result.stderr
    (tmp_path / "out" / "inputs.json").unlink()
    result = run(*options, "--latency-images", 0)
    assert result.exit_code == 2 and "holds runs, but no inputs.json" in result.stderr
    assert not (tmp_path / "out" / "inputs.json").exists()


def test_a_row_that_can_not_be_measured_leaves_the_others(
    copied: Path, preset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UserError("no threshold will do")

    monkeypatch.setattr("deepmoe.comparison.measure.set_exits", fail)
    in_this_process = "deepmoe.comparison.measuring.is_finished"  # none is left to the others
    monkeypatch.setattr(in_this_process, lambda path: False)
    folder = copied / "ours-exits-60-seed0"
    (folder / "measured.json").unlink()
    options = ("--macs", "0.6", "--out", copied, "--latency-images", 0, "--json")
    result = run(*METHODS, "--preset", preset, *options)
    assert result.exit_code == 2 and "ours-exits-60: no threshold will do" in result.stderr
    rows = json.loads(result.stdout)
    assert [line["method"] for line in rows] == ["start", "slimming", "dense"]


@pytest.mark.parametrize(
    ("name", "figure"),
    [("measured.json", "dense_macs"), ("measured.json", "accuracy"), ("latency.json", "dense_ms")],
)
def test_figures_that_can_not_be_are_damage(
    name: str, figure: str, copied: Path, preset: Path
) -> None:
    file = copied / "dense-seed0" / name
    wrong = 0 if figure.startswith("dense") else float("nan")
    file.write_text(json.dumps({**json.loads(file.read_text()), figure: wrong}))
    options = ("--macs", "0.6", "--out", copied, "--latency-images", 3, "--no-train")
    result = run(*METHODS, "--preset", preset, *options)
    assert result.exit_code == 2 and f"{name} is damaged: remove it" in result.stderr


@pytest.mark.parametrize("text", ["x", "{}", "[]", '{"data": 1}', '"' + "[" * 9])
def test_measuring_anything_else_is_refused(text: str) -> None:
    result = CliRunner().invoke(main, ["measure-run", text])
    assert result.exit_code == 2 and "is for `deepmoe compare` to call" in result.stderr


def test_lessons_are_teachers(compared: Path, tmp_path: Path) -> None:
    """A folder whose runs learnt from other lessons is refused."""
    start = compared / "start-seed0" / "last.safetensors"
    asked = []
    for views in (1, 2):
        lessons = tmp_path / f"lessons{views}.safetensors"
        teach_from([start], views, lessons)
        asked.append(
            open_comparison([method_named("li")], shares=[0.7], start=start, teachers=[lessons])
        )
    assert rows_of(asked[0])[0].steps[-1].config.loss.distillation == 0.9
    found = run_comparison(asked[0], tmp_path / "out", command="mine")
    assert found.complete
    with pytest.raises(UserError, match="another start or teacher"):
        run_comparison(asked[1], tmp_path / "out", command="mine")


def test_what_fails_before_any_work_leaves_the_folder_free(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device or a cluster that is not there; another start can then have the folder."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    start, out = compared / "start-seed0" / "last.safetensors", tmp_path / "out"
    missing = run("li", "he", "--start", start, "--set", "train.device=cuda", "--out", out)
    assert missing.exit_code == 2 and "no usable CUDA device" in missing.stderr
    assert not out.exists()
    out.mkdir()
    (out / "inputs.json").write_text('{"start": "another", "teachers": []}')  # of such a call
    options = ("--macs", "0.7", "--out", out, "--latency-images", 0)
    assert run("li", "--start", start, *options).exit_code == 0


def test_python_is_told_what_a_comparison_needs(compared: Path) -> None:
    start = compared / "start-seed0" / "last.safetensors"
    for methods, seeds, told in (
        (["li"], (0,), "method_named"),
        ([], (0,), "needs methods"),
        ([method_named("li")], (), "--seeds needs at least one number"),
    ):
        with pytest.raises(UserError, match=told):
            open_comparison(methods, shares=[0.7], start=start, seeds=seeds)


def test_a_teacher_that_cannot_be_made_is_refused(compared: Path, tmp_path: Path) -> None:
    """Its network is neither of the zoo nor the start's own."""
    start = compared / "start-seed0" / "last.safetensors"
    loaded, teacher = load_checkpoint(start), tmp_path / "teacher.safetensors"
    config = dataclasses.replace(
        loaded.config, model=dataclasses.replace(loaded.config.model, name="mine:network")
    )
    save_checkpoint(teacher, loaded.model, config, loaded.info, loaded.state)
    result = run("li", "--start", start, "--teacher", teacher, "--macs", "0.7")
    assert result.exit_code == 2 and "is made by mine:network: teachers are of" in result.stderr
