"""The harness: a start, methods, one table; on built-in data."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from forked import Forked
from helpers import tiny_config
from safetensors.torch import load_file

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.compare import method_named
from deepmoe.comparison import comparison_grid, open_comparison, rows_of, run_comparison
from deepmoe.comparison.measure import Finished
from deepmoe.comparison.measuring import measuring
from deepmoe.config import config_to_toml
from deepmoe.costs import count_costs
from deepmoe.deploy import ExitingNetwork
from deepmoe.errors import UserError
from deepmoe.sparse import sparsify
from deepmoe.training.lessons import teach_from

SETTINGS = (
    "model.gates=none",
    "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]",
    "train.epochs=1",
    "train.finetune_epochs=0",
    "data.holdout=300",
)


METHODS = ("slimming", "ours-exits", "dense")


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preset") / "tiny.toml"
    path.write_text(config_to_toml(tiny_config(*SETTINGS)))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def compared(preset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of three methods, at one cost."""
    out = tmp_path_factory.mktemp("compared")
    options = ("--macs", "0.6", "--out", out, "--latency-images", 3)
    with pytest.MonkeyPatch.context() as patch:  # processes of its own, with as many threads
        patch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        result = run(*METHODS, "--preset", preset, *options)
    assert result.exit_code == 0, result.output
    (out / "told.txt").write_text(result.stderr)
    return out


def test_runs_are_measured_as_they_end(compared: Path) -> None:
    """So a comparison that is stopped has figures of what has ended."""
    told = (compared / "told.txt").read_text().splitlines()
    for name in ("start-seed0", "slimming-60-seed0", "ours-exits-60-seed0"):
        ended = told.index(f"{name}: done")
        assert told[ended + 1] == f"{name}, measuring: started"
    assert told.index("dense-seed0: started") > told.index("start-seed0, measuring: started")
    assert not list(compared.glob("slimming_trained*/measured.json"))  # on the way, not a row


def test_the_table_holds_every_method_with_its_figures(compared: Path) -> None:
    result = json.loads((compared / "slimming_ours-exits_dense.json").read_text())
    rows = {line["method"]: line for line in result["values"]}
    assert list(rows) == ["start", "slimming", "ours-exits", "dense"]
    named = "deepmoe compare slimming ours-exits dense --preset tiny.toml --macs 0.6 --seeds 0"
    assert result["command"] == named
    assert str(compared) not in result["command"]
    assert rows["start"]["macs_share"] == rows["dense"]["macs_share"] == 1
    assert [rows[name]["epochs"] for name in rows] == [0, 2, 1, 1]  # slimming trains before, too
    assert 0.5 < rows["slimming"]["macs_share"] <= 0.6
    assert rows["ours-exits"]["exited"] is not None
    for line in rows.values():
        assert line["evaluated_on"] == "test" and line["seeds"] == 1
        assert line["method"] == "start" or line["latency_ratio"] > 0
    # Training under the penalty is part of what slimming takes.
    assert rows["slimming"]["prune_seconds"] > 0 and rows["dense"]["prune_seconds"] is None
    assert (compared / "slimming_ours-exits_dense.png").stat().st_size


def test_what_a_method_leaves_is_a_small_network_that_all_verbs_take(compared: Path) -> None:
    checkpoint = load_checkpoint(compared / "slimming-60-seed0" / "last.safetensors")
    small, whole = checkpoint.model, load_checkpoint(compared / "start-seed0/last.safetensors")
    assert count_costs(small, 8).params < count_costs(whole.model, 8).params
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        logits = small(x).logits
        torch.testing.assert_close(sparsify(small)(x).logits, logits, rtol=1e-3, atol=1e-3)
        exported = torch.export.export(small.network.eval(), (x,)).module()
        torch.testing.assert_close(exported(x), logits)
    for name in ("slimming-60-seed0/last.safetensors", "ours-exits-60-seed0/exits.safetensors"):
        told = CliRunner().invoke(main, ["eval", str(compared / name), "--json"])
        assert told.exit_code == 0 and json.loads(told.stdout)["macs_share"] <= 0.7
    exits = load_checkpoint(compared / "ours-exits-60-seed0" / "exits.safetensors").model
    assert exits.exit_at is not None
    with torch.no_grad():
        torch.testing.assert_close(ExitingNetwork(exits)(x[:1]), exits(x[:1]).logits)


def test_what_is_there_is_not_trained_again(compared: Path, preset: Path) -> None:
    files = sorted(compared.glob("*/*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in files}
    options = ("--macs", "0.6", "--out", compared, "--latency-images", 0, "--json")
    result = run(*METHODS, "--preset", preset, *options)
    assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert {line["latency_ratio"] for line in json.loads(result.stdout)} == {None}


def test_one_method_runs_here_and_goes_on_from_where_it_was(
    compared: Path, preset: Path, tmp_path: Path
) -> None:
    """In one process, from a checkpoint; the network is that of the sweep, to the bit."""
    start = compared / "start-seed0" / "last.safetensors"
    options = ("--start", start, "--macs", "0.6", "--out", tmp_path, "--latency-images", 0)
    result = run("slimming", *options)
    assert result.exit_code == 0, result.output
    assert "next: deepmoe predict" in result.stdout and "Network Slimming" in result.stdout
    here = load_file(tmp_path / "slimming-60-seed0" / "last.safetensors")
    there = load_file(compared / "slimming-60-seed0" / "last.safetensors")
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_published_schedules_are_rows_of_their_own(preset: Path) -> None:
    methods = [method_named(name) for name in ("li", "dense")]
    asked = open_comparison(
        methods, shares=(0.6, 0.7), preset=str(preset), seeds=(0, 1), published=True
    )
    rows = rows_of(asked)
    assert [row.name for row in rows] == [
        "li-60",
        "li-70",
        "li_published-60",
        "li_published-70",
        "dense",
    ]
    own, theirs = rows[0].steps[-1].config.train, rows[2].steps[-1].config.train
    assert (own.epochs, theirs.epochs, theirs.schedule) == (1, 40, "constant")
    grid = comparison_grid(asked, rows, jobs=3)
    assert len(grid.runs) == 2 * 6 and grid.jobs == 3  # the start of each seed comes with them
    assert {run.needs[0] for run in grid.runs if run.needs} == {"start-seed0", "start-seed1"}
    seeds = [run.config.train.seed for run in grid.runs]
    assert seeds == [0] * 6 + [1] * 6  # stopped early, it has a whole table of one seed
    epochs = [run.config.train.total_epochs for run in grid.runs if run.config.train.seed == 0]
    assert epochs == sorted(epochs, reverse=True) and epochs[0] > epochs[-1]


def test_slimming_trains_under_its_penalty_by_the_published_schedule_too(preset: Path) -> None:
    asked = open_comparison(
        [method_named("slimming")], shares=(0.6,), preset=str(preset), published=True
    )
    _, theirs = rows_of(asked)
    penalised, retrained = (step.config for step in theirs.steps)
    for train in (penalised.train, retrained.train):
        assert (train.epochs, train.batch_size, train.milestones) == (160, 64, (80, 120))
    assert penalised.loss.norm_sparsity > 0 == retrained.loss.norm_sparsity


def test_settings_of_the_schedule_are_of_the_retraining(preset: Path) -> None:
    methods = [method_named(name) for name in ("li", "thin-long")]
    asked = open_comparison(
        methods, shares=(0.5,), preset=str(preset), overrides=["train.epochs=3", "train.lr=0.02"]
    )
    assert asked.start is not None
    assert (asked.start.train.epochs, asked.start.train.lr) == (1, 0.1)
    assert [row.steps[-1].config.train.epochs for row in rows_of(asked)] == [3, 2]


def test_teachers_are_trained_first(preset: Path) -> None:
    asked = open_comparison(
        [method_named("taylor")],
        shares=(0.6,),
        preset=str(preset),
        seeds=(0, 1),
        teacher_preset=str(preset),
    )
    grid = comparison_grid(asked, rows_of(asked), jobs=1)
    names = [run.name for run in grid.in_order]
    taught = next(run for run in grid.runs if run.name == "taylor-60-seed1")
    assert taught.lessons == ["teacher-seed0", "teacher-seed1"]
    assert taught.config.loss.distillation == 0.9
    assert max(map(names.index, taught.lessons)) < names.index(taught.name)


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


def test_a_folder_of_other_settings_is_refused(compared: Path, preset: Path) -> None:
    """Also where only the start was trained with them."""
    options = ("--macs", "0.6", "--out", compared)
    for methods, other in ((METHODS, "train.epochs=2"), (("li", "he"), "data.holdout=200")):
        result = run(*methods, "--preset", preset, *options, "--set", other)
        assert result.exit_code == 2
        assert "was trained with other settings: give another --out" in result.stderr
    assert not (compared / "li_he.json").exists()


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


def test_a_signal_saves_and_the_same_command_goes_on(compared: Path, tmp_path: Path) -> None:
    start = str(compared / "start-seed0" / "last.safetensors")
    command = ["deepmoe", "compare", "li", "--start", start, "--macs", "0.7"]
    command += ["--out", str(tmp_path), "--set", "train.epochs=200"]
    with Forked(command) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "epoch 1/200" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()
    assert process.returncode == 75
    last = told.splitlines()[-1]
    assert last.startswith("Error: stopped by SIGTERM ")
    assert last.endswith("is saved, and the same command goes on from it")


def test_a_row_that_can_not_be_measured_leaves_the_others(
    compared: Path, preset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UserError("no threshold will do")

    monkeypatch.setattr("deepmoe.comparison.measure.set_exits", fail)
    in_this_process = "deepmoe.comparison.measuring.is_finished"  # none is left to the others
    monkeypatch.setattr(in_this_process, lambda path: False)
    folder = compared / "ours-exits-60-seed0"
    kept = (folder / "measured.json").read_text()
    (folder / "measured.json").unlink()
    options = ("--macs", "0.6", "--out", compared, "--latency-images", 0, "--json")
    result = run(*METHODS, "--preset", preset, *options)
    (folder / "measured.json").write_text(kept)
    assert result.exit_code == 2 and "ours-exits-60: no threshold will do" in result.stderr
    rows = json.loads(result.stdout)
    assert [line["method"] for line in rows] == ["start", "slimming", "dense"]


@pytest.mark.parametrize(
    ("name", "figure"),
    [("measured.json", "dense_macs"), ("measured.json", "accuracy"), ("latency.json", "dense_ms")],
)
def test_figures_that_can_not_be_are_damage(
    name: str, figure: str, compared: Path, preset: Path
) -> None:
    file = compared / "dense-seed0" / name
    kept = file.read_text()
    wrong = 0 if figure.startswith("dense") else float("nan")
    file.write_text(json.dumps({**json.loads(kept), figure: wrong}))
    options = ("--macs", "0.6", "--out", compared, "--latency-images", 3, "--no-train")
    result = run(*METHODS, "--preset", preset, *options)
    file.write_text(kept)
    assert result.exit_code == 2 and f"{name} is damaged: remove it" in result.stderr


def test_distillation_can_be_set(compared: Path) -> None:
    start = compared / "start-seed0" / "last.safetensors"
    asked = open_comparison(
        [method_named("li")],
        shares=[0.7],
        start=start,
        teachers=[start],
        overrides=["loss.distillation=0.3"],
    )
    (row,) = rows_of(asked)
    assert row.steps[-1].config.loss.distillation == 0.3


def test_python_takes_names_of_files(compared: Path, tmp_path: Path) -> None:
    start = str(compared / "start-seed0" / "last.safetensors")
    asked = open_comparison([method_named("li")], shares=[0.7], start=start)
    found = run_comparison(asked, str(tmp_path), command="mine")
    assert found.complete and [line["method"] for line in found.table] == ["start", "li"]
    assert found.checkpoints["li-70"].exists()


def test_methods_are_listed() -> None:
    assert "Huang and Wang 2018" in run("list").stdout
    listed = json.loads(run("list", "--json").stdout)
    assert {"name", "method", "published by", "chooses channels for"} == set(listed[0])


def test_a_table_of_what_is_finished_trains_nothing(compared: Path, preset: Path) -> None:
    """And measures side by side what has no figures yet, with the same result."""
    files = sorted(compared.glob("*/*.json"))
    kept = {path: path.read_text() for path in files if path.name == "measured.json"}
    for path in kept:
        path.unlink()
    options = ("--macs", "0.6", "--out", compared, "--latency-images", 3, "--json")
    result = run("li", *METHODS, "--preset", preset, *options, "--no-train", "--jobs", 2)
    assert result.exit_code == 2 and "some rows have no result" in result.stderr
    rows = json.loads(result.stdout)
    assert [line["method"] for line in rows] == ["start", *METHODS]
    assert {path: path.read_text() for path in kept} == kept
    # Latencies are those that were measured before.
    timed = json.loads((compared / "slimming-60-seed0" / "latency.json").read_text())
    assert rows[1]["latency_ratio"] == timed["ms"] / timed["dense_ms"]
    assert (compared / "slimming-60-seed0" / "latency.json") in files
    assert not (compared / "li-60-seed0").exists()


def test_what_is_gone_is_made_again_or_told(compared: Path, preset: Path, tmp_path: Path) -> None:
    """Exits are fitted anew; a run that has a result is not trained again by itself."""
    out = tmp_path / "a 'folder' of \u4e2a\n"
    shutil.copytree(compared, out)
    exits, gone = out / "ours-exits-60-seed0" / "exits.safetensors", out / "dense-seed0"
    exits.unlink()
    (gone / "last.safetensors").unlink()
    options = ("--macs", "0.6", "--out", out, "--latency-images", 0, "--json")
    result = run(*METHODS, "--preset", preset, *options)
    assert result.exit_code == 2 and "some rows have no result: see above" in result.stderr
    told = "dense-seed0/last.safetensors is gone, though its run has ended: remove its folder"
    assert told in result.stderr
    assert exits.exists() and not (gone / "last.safetensors").exists()
    assert [line["method"] for line in json.loads(result.stdout)] == ["start", *METHODS[:2]]


def test_one_seed_that_is_gone_is_told(compared: Path, preset: Path, tmp_path: Path) -> None:
    """The row has others, but a mean that looks whole would not be."""
    methods = [method_named("dense")]
    asked = open_comparison(methods, shares=(0.6,), preset=str(preset), seeds=(0, 1))
    found = run_comparison(asked, tmp_path, command="mine")
    assert found.complete and [line["seeds"] for line in found.table] == [2, 2]
    shutil.rmtree(tmp_path / "dense-seed1")
    found = run_comparison(asked, tmp_path, command="mine")
    assert not found.complete and [line["seeds"] for line in found.table] == [2, 1]


def test_a_given_start_may_be_of_any_epoch(compared: Path, tmp_path: Path) -> None:
    """Such as the best one, which is not the last."""
    start = tmp_path / "best.safetensors"
    loaded = load_checkpoint(compared / "start-seed0" / "last.safetensors")
    train = dataclasses.replace(loaded.config.train, epochs=2)
    config = dataclasses.replace(loaded.config, train=train)
    save_checkpoint(start, loaded.model, config, loaded.info, loaded.state)
    overrides = ["train.epochs=1"]
    asked = open_comparison([method_named("li")], shares=[0.7], start=start, overrides=overrides)
    found = run_comparison(asked, tmp_path / "out", command="mine")
    assert found.complete and [line["method"] for line in found.table] == ["start", "li"]


def test_costs_that_are_named_alike_are_one(preset: Path) -> None:
    shares = (0.6, 0.7, 0.6 + 1e-13)
    asked = open_comparison([method_named("li")], shares=shares, preset=str(preset))
    assert [row.name for row in rows_of(asked)] == ["li-60", "li-70"]
    assert len(comparison_grid(asked, rows_of(asked), jobs=1).runs) == 3


def test_a_job_is_described_for_any_folder_and_machine(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures lie beside the run's own file, also where that is a link."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    last = Path("run", "last.safetensors")
    last.symlink_to(compared / "dense-seed0" / "last.safetensors")
    data = load_checkpoint(last).config.data
    job = measuring(Finished("dense", last, own=True), data, "cpu").begin()
    assert job is not None and job.log == tmp_path / "run" / "measuring.txt"
    monkeypatch.chdir(compared)
    assert CliRunner().invoke(main, job.arguments).exit_code == 0
    assert (tmp_path / "run" / "measured.json").exists()


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
