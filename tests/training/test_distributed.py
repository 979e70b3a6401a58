"""Two processes train as one does with the same global batch."""

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Forked
from helpers import TINY_RUN, tiny_config
from safetensors.torch import load_file

from deepmoe.errors import UserError
from deepmoe.training import fit
from deepmoe.training.distributed import make_fabric
from deepmoe.training.log import read_metrics

# In double precision: in single, rounding grows to a visible difference within a few epochs.
OVERRIDES = [
    "train.sync_bn=true",
    "train.precision=64-true",
    "train.target_macs=0.6",
]


def command_for_two(out: Path, *extra: str) -> list[str]:
    settings = [a for s in (*TINY_RUN, *OVERRIDES) for a in ("--set", s)]
    train = ["deepmoe", "train", "quickstart", "--devices", "2", "--out", str(out)]
    return [*train, *settings, *extra]


def train_by_torchrun(out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    whole = [*command, "-m", *command_for_two(out)]
    return subprocess.run(whole, env=env, capture_output=True, text=True)


def train_with_two(out: Path, *extra: str) -> list[tuple[int | None, str]]:
    """Exit code and complaints of each process, which are told of each other as torchrun does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    known = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **known, **own, "TORCHELASTIC_RUN_ID": "none"}
        processes.append(Forked(command_for_two(out, *extra), env=env))
    told = [process.stderr.read() for process in processes]
    return [(process.wait(), text) for process, text in zip(processes, told, strict=True)]


def assert_same_run(one: Path, other: Path) -> None:
    for left, right in zip(read_metrics(one), read_metrics(other), strict=True):
        for key in ("loss", "task_loss", "gate_l1", "embedding_loss", "macs", "active"):
            assert left[key] == pytest.approx(right[key], rel=1e-4), (left["epoch"], key)
        for key in ("accuracy", "train_accuracy", "images"):
            assert left[key] == pytest.approx(right[key], abs=1e-6), (left["epoch"], key)


def test_two_processes_give_the_curve_of_one(tmp_path) -> None:
    whole = fit(tiny_config(*OVERRIDES), tmp_path / "one", quiet=True)
    result = train_by_torchrun(tmp_path / "two")
    assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "two" / "metrics.jsonl", whole.metrics)
    # The same checkpoint goes on with another number of processes.
    weights = load_file(tmp_path / "two" / "last.safetensors")
    resumed = fit(tiny_config(*OVERRIDES), tmp_path / "two", resume=True, quiet=True)
    assert resumed.evaluation.images == 360
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, weights[f"model.{name}"])


def test_two_processes_share_the_codes_of_one(tmp_path) -> None:
    whole = fit(tiny_config(*OVERRIDES, "train.codes=4"), tmp_path / "one", quiet=True)
    for code, told in train_with_two(tmp_path / "two", "--set", "train.codes=4"):
        assert code == 0, told
    assert_same_run(tmp_path / "two" / "metrics.jsonl", whole.metrics)
    codes = load_file(tmp_path / "two" / "last.safetensors")["model.codebook.codes"]
    torch.testing.assert_close(codes, whole.model.codebook.codes)


def test_resume_on_another_number_of_devices(tmp_path) -> None:
    whole = fit(tiny_config(*OVERRIDES), tmp_path / "one", quiet=True)
    (tmp_path / "two").mkdir()
    os.link(tmp_path / "one" / "epoch-0003.safetensors", tmp_path / "two" / "last.safetensors")
    lines = whole.metrics.read_text().splitlines(keepends=True)
    (tmp_path / "two" / "metrics.jsonl").write_text("".join(lines[:3]))
    for code, told in train_with_two(tmp_path / "two", "--resume"):
        assert code == 0, told
    assert_same_run(tmp_path / "two" / "metrics.jsonl", whole.metrics)


def test_a_mistake_is_told_by_every_process_and_none_hangs(tmp_path) -> None:
    for code, told in train_with_two(tmp_path, "--set", "train.batch_size=255"):
        assert code == 2
        assert "can't be shared evenly by 2 devices" in told


def test_processes_and_devices_must_agree(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were launched"):
        fit(tiny_config(), tmp_path)


def test_devices_must_be_there(tmp_path) -> None:
    with pytest.raises(UserError, match="at least 1"):
        fit(tiny_config(), tmp_path, devices=0)


def test_fabric_does_not_talk_in_between() -> None:
    logger = logging.getLogger("lightning_fabric.utilities.rank_zero")
    logging.getLogger("lightning_fabric").setLevel(logging.INFO)  # as it sets itself
    make_fabric(tiny_config("train.precision=bf16-mixed").train)
    assert not logger.isEnabledFor(logging.INFO) and logger.isEnabledFor(logging.WARNING)
