"""Runs of a sweep on the machines of a Ray cluster."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small_sweeps import TINY, lines_of, write

from deepmoe.checkpoint import load_checkpoint
from deepmoe.cli import main
from deepmoe.errors import UserError
from deepmoe.files import LOCK_NAME, user_of
from deepmoe.sweep import on_ray, read_grid, sweep
from deepmoe.sweep.schedule import End, Job

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray has clusters on Linux")
FAMILY = TINY.replace('"train.epochs" = 1', '"train.epochs" = 10') + (
    '[runs.dense]\n"model.gates" = "none"\n'
    '[runs.student]\nseeds = [0]\n"train.teacher" = "run:dense"\n"loss.distillation" = 0.5\n'
    '"train.epochs" = 2\n'
)
SECONDS = 300.0  # that nothing here should take


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One machine that takes one run at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        yield cluster
        cluster.shutdown()


def arguments(grid: Path, out: Path) -> list[str]:
    """A sweep by the command line; its results lie in its folder."""
    return ["sweep", str(grid), "--out", str(out), "--results", str(out / "runs.jsonl"), "--json"]


def start(grid: Path, out: Path, address: str) -> "subprocess.Popen[str]":
    """A sweep on a cluster."""
    return subprocess.Popen(
        [sys.executable, "-m", "deepmoe", *arguments(grid, out), "--ray", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(happened: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers(folder: Path) -> list[int]:
    """Processes of Ray that a run was given to, in turn."""
    log = folder / "log.txt"
    told = log.read_text() if log.exists() else ""
    return [int(pid) for pid in re.findall(r"^on .+, by process (\d+)$", told, re.MULTILINE)]


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State: Z"


def parent(pid: int) -> int:
    return int(re.findall(r"^PPid:\s+(\d+)$", status(pid), re.MULTILINE)[0])


def is_alive(pid: int) -> bool:
    return re.search(r"^State:\s+[ZX]", status(pid), re.MULTILINE) is None


@pytest.mark.slow
def test_a_lost_machine_s_run_goes_on_elsewhere_and_ends_in_the_same_bits(
    cluster: Cluster, tmp_path: Path
) -> None:
    grid, out, local = write(tmp_path, FAMILY), tmp_path / "runs", tmp_path / "local"
    node = cluster.add_node(num_cpus=1)
    process = start(grid, out, cluster.address)
    runs = [out / "dense-seed0", out / "dense-seed1"]
    wait_until(lambda: all(map(workers, runs)), process)
    (raylet,) = [info.process.pid for info in node.all_processes["raylet"]]
    (victim,) = [run for run in runs if parent(workers(run)[0]) == raylet]
    wait_until((victim / "last.safetensors").exists, process)
    # Read, not asked for: who asks holds the lock for a moment, and a run may come just then.
    trainer = int(re.findall(r"process (\d+) on", (victim / LOCK_NAME).read_text())[0])
    assert parent(trainer) == workers(victim)[0]
    cluster.remove_node(node, allow_graceful=False)  # its processes are killed
    wait_until(lambda: not is_alive(trainer))  # nobody trains on unseen

    told, noise = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, noise
    assert [len(workers(run)) for run in runs] == [1 + (run == victim) for run in runs]
    names = ["dense-seed0", "dense-seed1", "student-seed0"]
    assert noise.splitlines()[:2] == [f"{name}: handed to Ray" for name in names[:2]]
    ends = {f"{name}: done" for name in names}
    assert set(noise.splitlines()[2:]) == {*ends, "student-seed0: handed to Ray"}
    assert [row["run"] for row in json.loads(told)] == ["dense", "student"]

    assert CliRunner().invoke(main, arguments(grid, local)).exit_code == 0
    mine, theirs = lines_of(out / "runs.jsonl"), lines_of(local / "runs.jsonl")
    for name in names:
        last, expected = mine[name]["values"]["last"], theirs[name]["values"]["last"]
        for seconds in (last, expected):
            seconds.pop("seconds")
        assert last == expected
        assert {**mine[name], "values": 0} == {**theirs[name], "values": 0}
        tensors = load_file(out / name / "last.safetensors")
        same = load_file(local / name / "last.safetensors")
        assert tensors.keys() == same.keys()
        assert all(torch.equal(tensors[key], same[key]) for key in same)


def test_a_sweep_that_is_stopped_lets_its_runs_save(cluster: Cluster, tmp_path: Path) -> None:
    text = TINY.replace("[0, 1]", "[0]").replace('"train.epochs" = 1', '"train.epochs" = 5000')
    out = tmp_path / "runs"
    folder = out / "grid-seed0"
    process = start(write(tmp_path, text), out, cluster.address)
    wait_until((folder / "last.safetensors").exists, process)
    process.send_signal(signal.SIGTERM)
    _, noise = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert noise == "grid-seed0: handed to Ray\n"
    assert "is saved, and --resume goes on" in (folder / "log.txt").read_text()
    assert user_of(folder) is None
    assert load_checkpoint(folder / "last.safetensors").state.epoch >= 1


@pytest.mark.parametrize(
    ("address", "seconds"),
    [("nonsense", 30.0), ("local", 30.0), ("127.0.0.1:1", 0.1), ("ray://localhost:1", 0.1)],
)
def test_a_cluster_that_does_not_answer_is_told_at_once(
    address: str, seconds: float, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(on_ray, "CONNECT_SECONDS", seconds)
    grid = read_grid(write(tmp_path, TINY))
    with pytest.raises(UserError) as told:
        sweep(grid, tmp_path / "runs", tmp_path / "runs.jsonl", command="test", ray=address)
    assert "cluster" in str(told.value) and "\n" not in str(told.value)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".lock"]


def test_a_cluster_that_can_not_train_the_runs_is_told_at_once(
    cluster: Cluster, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(on_ray, "write_atomically", lambda *_: None)  # as on storage of its own
    out = tmp_path / "runs"
    for override, reason in (
        ("train.device=cuda", "no machine of the cluster has a GPU"),
        ("train.device=cpu", f"of the cluster does not see {out}: set --out to a folder that all"),
    ):
        grid = read_grid(write(tmp_path, TINY), [override])
        with pytest.raises(UserError, match=re.escape(reason)):
            sweep(grid, out, tmp_path / "runs.jsonl", command="test", ray=cluster.address)
    monkeypatch.undo()
    monkeypatch.setattr("deepmoe.__version__", "0.0")
    with pytest.raises(UserError, match=r"of the cluster has deepmoe .+, not 0\.0"):
        sweep(grid, out, tmp_path / "runs.jsonl", command="test", ray=cluster.address)
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_a_run_that_ray_gives_up_has_failed_and_its_log_says_so(
    tmp_path: Path, monkeypatch
) -> None:
    def give_up(_: object) -> None:
        raise ray.exceptions.WorkerCrashedError

    monkeypatch.setattr(ray, "get", give_up)
    monkeypatch.setattr(ray, "wait", lambda tasks, **_: (tasks, []))
    backend = on_ray.RayCluster({"cpu": {"num_cpus": 1}})
    job = Job("dense-seed0", ("train",), tmp_path / "log.txt", "cpu", call=list)
    backend._going["task"] = job
    assert backend.ended() == [(job, End(1))] and backend.ended() == []
    assert "Error: Ray could not run it: The worker died" in job.log.read_text()


def test_what_a_run_asks_a_machine_for(monkeypatch) -> None:
    small, large = {"Resources": {"CPU": 1.0}}, {"Resources": {"CPU": 16.0, "GPU": 2.0}}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert on_ray.demand("auto", [small, large], 3) == {"num_cpus": 2, "num_gpus": 0.3333}
    assert on_ray.demand("cuda", [large], 1) == {"num_cpus": 2, "num_gpus": 1}
    assert on_ray.demand("cpu", [small, large], 3) == {"num_cpus": 2}
    assert on_ray.demand("auto", [small], 3) == {"num_cpus": 1}
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "4,2")
    assert on_ray.demand("cpu", [large], 1) == {"num_cpus": 4}
    with pytest.raises(UserError, match="no machine of the cluster has a processor"):
        on_ray.demand("cpu", [{"Resources": {}}], 1)
