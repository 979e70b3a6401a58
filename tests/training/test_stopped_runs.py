"""A run that was stopped, by whatever, goes on to the same weights."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import call_forked
from helpers import TINY_RUN, assert_same_weights, slow, tiny_config
from killed_run import train_and
from small_runs import run, without_time

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.config import apply_overrides
from deepmoe.errors import UserError
from deepmoe.training import fit
from deepmoe.training.log import read_metrics


def run_and(out: Path, action: str, numbers: tuple[int, ...], *settings: str) -> int:
    """Trains in another process that does something to itself; returns its exit code."""
    return call_forked(train_and, action, numbers, out, settings)


def names_of_epochs(folder: Path) -> dict[str, tuple[int, float | None]]:
    """Which epoch each checkpoint of a folder is of, and the best accuracy it knows."""
    states = {p.name: load_checkpoint(p).state for p in folder.glob("*.safetensors")}
    return {name: (state.epoch, state.best) for name, state in states.items()}


# The files of a run: 1 config.toml, 2 metrics.jsonl, then a checkpoint an epoch: 3, 4 | 5, 6.
@pytest.mark.parametrize(
    "action",
    [
        ("kill-batch", (0, 2)),
        ("kill-write", (3,)),
        slow(("kill-batch", (1, 0))),
        ("kill-batch", (2, 1)),
        slow(("kill-write", (6,))),
        ("kill-metrics", (1,)),
        slow(("kill-keep", (1,))),
        ("kill-keep", (4,)),
    ],
    ids=str,
)
def test_a_killed_run_resumes_to_the_same_weights(action, whole_run, tmp_path) -> None:
    assert run_and(tmp_path, *action) == -signal.SIGKILL
    finished = [m["epoch"] for m in read_metrics(tmp_path / "metrics.jsonl")]
    last = tmp_path / "last.safetensors"
    assert max(finished, default=0) <= (load_checkpoint(last).state.epoch if last.exists() else 0)
    resumed = run(tiny_config(), tmp_path, resume=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole_run.metrics)
    assert names_of_epochs(tmp_path) == names_of_epochs(whole_run.checkpoint.parent)


@pytest.mark.parametrize(
    "action",
    [
        ("term-batch", (1, 3)),
        ("int-batch", (3, 0)),
        ("hup-batch", (2, 1)),
        ("term-twice", (2, 1)),  # as `timeout` sends it
    ],
    ids=str,
)
def test_a_signal_saves_within_the_epoch_and_has_its_own_exit_code(
    action, whole_run, tmp_path
) -> None:
    assert run_and(tmp_path, *action) == 75
    state = load_checkpoint(tmp_path / "last.safetensors").state
    (epoch, batch) = action[1]
    assert (state.epoch, state.batch) == (epoch, batch + 1)
    resumed = run(tiny_config(), tmp_path, resume=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole_run.metrics)


# With a budget, the second epoch goes through images to meet it before it is evaluated.
@pytest.mark.parametrize(
    ("budget", "evaluation", "place"),
    [((), 2, (1, 5)), ((), 4, (3, 5)), (("train.target_macs=0.6",), 3, (1, 4))],
)
def test_a_signal_during_evaluation_saves_the_epoch_as_trained(
    budget, evaluation, place, whole_run, tmp_path
) -> None:
    whole = run(tiny_config(*budget), tmp_path / "whole") if budget else whole_run
    out = tmp_path / "run"
    assert run_and(out, "term-evaluation", (evaluation,), *budget) == 75
    state = load_checkpoint(out / "last.safetensors").state
    assert (state.epoch, state.batch) == place and state.budget_met
    resumed = run(tiny_config(*budget), out, resume=True)
    assert_same_weights(resumed.checkpoint, whole.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole.metrics)


def test_metrics_name_no_epoch_that_no_checkpoint_has(whole_run, tmp_path) -> None:
    rare = ("train.checkpoint_epochs=100", "train.evaluate_epochs=100")
    assert run_and(tmp_path, "kill-batch", (3, 1), *rare) == -signal.SIGKILL
    assert not (tmp_path / "last.safetensors").exists()
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    shutil.rmtree(tmp_path)
    assert run_and(tmp_path, "term-batch", (3, 1), *rare) == 75
    assert [m["epoch"] for m in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("closed", ["pipe", slow("full disk")])
def test_a_closed_output_ends_a_run_with_its_checkpoint_saved(closed, whole_run, tmp_path) -> None:
    settings = [arg for item in TINY_RUN for arg in ("--set", item)]
    command = [sys.executable, "-m", "deepmoe", "train", "quickstart", *settings]
    command += ["--out", str(tmp_path)]
    options = {"stderr": subprocess.PIPE, "text": True}
    threads = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    if closed == "pipe":
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=threads, **options) as process:
            process.stdout.readline()  # as `head -n 1` does
            process.stdout.close()
            told = process.stderr.read()
    else:
        with open("/dev/full", "w") as full:
            process = subprocess.run(command, stdout=full, env=threads, **options)
        told = process.stderr
    assert process.returncode == 75
    assert told.startswith("Error: the output ") and "--resume goes on" in told
    assert len(told.splitlines()) == 1
    resumed = run(tiny_config(), tmp_path, resume=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole_run.metrics)


def test_a_place_that_an_epoch_does_not_have_is_refused(tmp_path) -> None:
    assert run_and(tmp_path, "term-batch", (1, 3)) == 75
    path = tmp_path / "last.safetensors"
    saved = load_checkpoint(path)
    sums = (*saved.state.sums[:-1], 1e9)
    state = dataclasses.replace(saved.state, batch=10**9, sums=sums)
    save_checkpoint(path, saved.model, saved.config, saved.info, state)
    with pytest.raises(UserError, match="1000000000 batches into an epoch that has only 5"):
        run(tiny_config(), tmp_path, resume=True)


def test_a_metrics_line_cut_short_is_dropped(whole_run, tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole_run.metrics.read_text()[:-10])
    assert [m["epoch"] for m in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(tmp_path / "missing.jsonl") == []


def test_resuming_a_finished_run_changes_nothing(whole_run, tmp_path) -> None:
    first = run(tiny_config(), tmp_path)
    content = first.checkpoint.read_bytes()
    again = run(tiny_config(), tmp_path, resume=True)
    assert again.checkpoint.read_bytes() == content
    assert again.evaluation == first.evaluation
    assert without_time(again.metrics) == without_time(whole_run.metrics)


def test_a_resumed_run_tells_that_its_teacher_is_another(whole_run, tmp_path, capsys) -> None:
    for name in ("one", "other"):
        shutil.copy(whole_run.checkpoint, tmp_path / f"{name}.safetensors")
    taught = tiny_config(f"train.teacher={tmp_path / 'one.safetensors'}", "loss.distillation=0.5")
    fit(taught, tmp_path / "run", quiet=True)
    fit(taught, tmp_path / "run", resume=True)
    assert "started with" not in capsys.readouterr().out
    taught = apply_overrides(taught, [f"train.teacher={tmp_path / 'other.safetensors'}"])
    fit(taught, tmp_path / "run", resume=True)
    assert "another train.start or train.teacher than it was started" in capsys.readouterr().out
