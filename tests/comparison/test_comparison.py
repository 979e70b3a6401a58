"""The harness: a start, methods, one table; on built-in data."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from forked import Forked
from safetensors.torch import load_file
from small_comparison import METHODS, run

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.compare import method_named
from deepmoe.comparison import open_comparison, run_comparison
from deepmoe.comparison.measure import Finished
from deepmoe.comparison.measuring import measuring
from deepmoe.costs import count_costs
from deepmoe.deploy import ExitingNetwork
from deepmoe.sparse import sparsify


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


def test_what_is_there_is_not_trained_again(copied: Path, preset: Path) -> None:
    files = sorted(copied.glob("*/*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in files}
    options = ("--macs", "0.6", "--out", copied, "--latency-images", 0, "--json")
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


def test_a_table_of_what_is_finished_trains_nothing(copied: Path, preset: Path) -> None:
    """And measures side by side what has no figures yet, with the same result."""
    files = sorted(copied.glob("*/*.json"))
    kept = {path: path.read_text() for path in files if path.name == "measured.json"}
    for path in kept:
        path.unlink()
    options = ("--macs", "0.6", "--out", copied, "--latency-images", 3, "--json")
    result = run("li", *METHODS, "--preset", preset, *options, "--no-train", "--jobs", 2)
    assert result.exit_code == 2 and "some rows have no result" in result.stderr
    rows = json.loads(result.stdout)
    assert [line["method"] for line in rows] == ["start", *METHODS]
    assert {path: path.read_text() for path in kept} == kept
    # Latencies are those that were measured before.
    timed = json.loads((copied / "slimming-60-seed0" / "latency.json").read_text())
    assert rows[1]["latency_ratio"] == timed["ms"] / timed["dense_ms"]
    assert (copied / "slimming-60-seed0" / "latency.json") in files
    assert not (copied / "li-60-seed0").exists()


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
