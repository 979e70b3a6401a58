"""Jobs as tasks of a Ray cluster."""

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepmoe
from deepmoe import launch
from deepmoe.errors import UserError
from deepmoe.extras import require
from deepmoe.files import write_atomically
from deepmoe.sweep.schedule import POLL_SECONDS, End, Job

CONNECT_SECONDS = 30.0  # for a cluster to answer
LOOK_SECONDS = 120.0  # for all of its machines to look for the folder of the runs
STOP_SECONDS = 300.0  # for runs to save
MARKER = ".shared"  # what machines look for, in the folder of the runs
RETRIES = 20  # of a run whose machine is lost: it goes on elsewhere, from its last checkpoint
SHARES = 10_000  # of a GPU, that Ray can tell apart

# It sends nothing, and drops what it would print among the results when a machine is lost.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}

# In a process of its own: where nobody answers, Ray tries for minutes, and then ends the process.
_CONNECT = """
import logging, sys, ray
try:
    ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)
except Exception as error:
    sys.exit("Error: " + " ".join(str(error).split()))
"""


class RayCluster:
    """Hands jobs to a cluster that is connected; which machine runs one, and when, is Ray's."""

    taken = "handed to Ray"
    poll_seconds = POLL_SECONDS

    def __init__(self, demands: Mapping[str, dict[str, float]]) -> None:
        """Takes what a job asks a machine for, by its device."""
        import ray

        self._demands = demands
        remote: Any = ray.remote(max_retries=RETRIES)
        self._run = remote(launch.run_here)
        self._going: dict[Any, Job] = {}

    def has_room(self) -> bool:
        """Jobs wait in the cluster."""
        return True

    def start(self, job: Job) -> None:
        """Makes a task of it."""
        task = self._run.options(name=job.name, **self._demands[job.device])
        reference = task.remote(
            job.arguments,
            str(job.log),
            own=None if job.own is None else str(job.own),
            threads=launch.threads(),
            folder=os.getcwd(),
            device=job.device,
        )
        self._going[reference] = job

    def ended(self) -> list[tuple[Job, End]]:
        """Jobs whose tasks have ended, or can't."""
        import ray

        going = list(self._going)
        ready, _ = ray.wait(going, num_returns=len(going), timeout=0) if going else ([], None)
        return [(job, _end(task, job)) for task in ready if (job := self._going.pop(task))]

    def stop(self) -> None:
        """Cancels all tasks, which makes runs save, and waits for them."""
        import ray

        going, self._going = list(self._going), {}
        for task in going:
            ray.cancel(task)
        if going:
            ray.wait(going, num_returns=len(going), timeout=STOP_SECONDS)


def _end(task: Any, job: Job) -> End:
    import ray

    try:
        return End(*ray.get(task))
    except ray.exceptions.RayError as error:
        with job.log.open("a", encoding="utf-8") as log:
            log.write(f"Error: Ray could not run it: {_last_line(str(error))}\n")
        return End(1)


@contextlib.contextmanager
def ray_cluster(address: str, out: Path, devices: Iterable[str], jobs: int) -> Iterator[RayCluster]:
    """Connects to a cluster while it is used, once it is known to be able to do the work.

    Args:
        address: of its head.
        out: folder of the runs, that all machines have to see.
        devices: that runs ask for.
        jobs: that share a GPU.

    Raises:
        UserError: for a cluster that does not answer, has no GPU though runs ask for one, or has
            machines that do not see the folder.
    """
    require("ray", "ray")
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)  # read when Ray is imported
    _check_address(address)
    import ray

    former = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # of many kinds, such as of a program that uses Ray already
        raise UserError(
            f"cannot connect to Ray at {address!r}: {_last_line(str(error))}"
        ) from error
    signal.signal(signal.SIGTERM, former)  # Ray has put its own there
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        demands = {device: demand(device, nodes, jobs) for device in devices}
        _check_folder(out, nodes)
        yield RayCluster(demands)
    finally:
        ray.shutdown()


def demand(device: str, nodes: Sequence[Mapping[str, Any]], jobs: int) -> dict[str, float]:
    """What a run asks a machine for: its threads, and its share of a GPU where there are any.

    Args:
        device: as train.device says.
        nodes: of the cluster, as Ray tells of them.
        jobs: that share a GPU.

    Raises:
        UserError: where no machine could ever run it.
    """
    with_gpu = [node for node in nodes if node["Resources"].get("GPU", 0) >= 1]
    if device == "cuda" and not with_gpu:
        raise UserError("runs ask for train.device = cuda, but no machine of the cluster has a GPU")
    on_gpu = device != "cpu" and bool(with_gpu)
    able = with_gpu if on_gpu else nodes
    most = max((node["Resources"].get("CPU", 0.0) for node in able), default=0.0)
    if most < 1:
        raise UserError("no machine of the cluster has a processor for a run")
    threads = launch.threads().split(",")[0]
    asked = {"num_cpus": min(float(threads) if threads.isdecimal() else 1.0, most)}
    if on_gpu:
        asked["num_gpus"] = max(SHARES // jobs, 1) / SHARES
    return asked


def _check_address(address: str) -> None:
    """Refuses a cluster that can't be reached."""
    if address == "local":  # Ray would start a cluster of its own
        raise UserError("--ray takes the address of a cluster; without it, runs are local")
    refusal = f"no Ray cluster can be reached at {address!r}"
    command = [sys.executable, "-c", _CONNECT, address]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=CONNECT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{refusal}: none answers within {CONNECT_SECONDS:.0f} seconds") from None
    if told.returncode:
        raise UserError(f"{refusal}: {_last_line(told.stderr).removeprefix('Error: ')}")


def _check_folder(out: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Refuses machines that do not see the folder of the runs, or have another deepmoe."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    marker, content = out / MARKER, secrets.token_hex()
    write_atomically(marker, content.encode())
    remote: Any = ray.remote(num_cpus=0, max_retries=0)
    look = remote(launch.sees)
    try:
        looks = {}
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = look.options(scheduling_strategy=there).remote(str(marker), content)
            looks[task] = node["NodeManagerHostname"]
        ready, _ = ray.wait(list(looks), num_returns=len(looks), timeout=LOOK_SECONDS)
        for task, host in looks.items():
            if task not in ready:
                raise UserError(f"{host} of the cluster does not answer")
            try:
                version = ray.get(task)
            except ray.exceptions.RayError as error:
                reason = _last_line(str(error))
                raise UserError(f"{host} of the cluster can't run deepmoe: {reason}") from error
            if version is None:
                raise UserError(
                    f"{host} of the cluster does not see {out}: set --out to a folder that all of "
                    "its machines share"
                )
            if version != deepmoe.__version__:
                raise UserError(
                    f"{host} of the cluster has deepmoe {version}, not {deepmoe.__version__}"
                )
    finally:
        marker.unlink(missing_ok=True)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it does not say why"])[-1]
