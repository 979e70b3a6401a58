"""Trains the runs of a grid, several side by side; goes on where it was stopped."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from deepmoe.checkpoint import read_progress
from deepmoe.errors import UserError
from deepmoe.files import exclusive, user_of
from deepmoe.sweep.grid import Grid, Run
from deepmoe.sweep.local import LocalProcesses, ThisProcess
from deepmoe.sweep.on_ray import ray_cluster
from deepmoe.sweep.results import RunResult, read_results
from deepmoe.sweep.schedule import Backend, Step, work_off
from deepmoe.sweep.steps import TAUGHT, last_checkpoint, resolved, steps_of
from deepmoe.training.fit import as_pruned, changed_keys


def sweep(
    grid: Grid,
    out: Path,
    results: Path,
    *,
    command: str,
    jobs: int | None = None,
    ray: str | None = None,
    here: bool = False,
    afterwards: Sequence[Step] = (),
) -> bool:
    """Trains what has no result yet, several runs side by side.

    Args:
        grid: the runs.
        out: folder of the runs' own folders.
        results: file of one line a run.
        command: to note in the results.
        jobs: runs side by side, on a cluster those that share a GPU; as the grid says if not
            given.
        ray: address of a Ray cluster that trains them, in place of this machine.
        here: one after the other in this process, not in processes of their own.
        afterwards: what else is to be done, each as soon as the runs that it needs have ended.

    Returns:
        Whether all runs have a result now. A run that fails does not stop the others; its log
        lies in its folder.

    Raises:
        UserError: for results or runs of other settings, while another sweep uses the folder,
            while runs of a killed sweep still train, or for a cluster that can't train them.
    """
    out, jobs = out.resolve(), jobs or grid.jobs
    _check_encodable(out)
    with exclusive(out):
        waiting = to_train(grid, out, results)
        _check_free(waiting, out)
        # What can be done afterwards comes first: a sweep that is stopped has then done most of it.
        runs = steps_of(waiting, out, results, command=command, views=grid.views)
        steps: list[Step] = [*afterwards, *runs]
        if steps:
            local = ThisProcess() if here else LocalProcesses(jobs)
            backend: AbstractContextManager[Backend] = nullcontext(local)
            if ray is not None:
                devices = {run.config.train.device for run in grid.runs}
                backend = ray_cluster(ray, out, devices, jobs)
            with backend as taker:
                work_off(steps, taker)
    done = read_results(results)
    return all(run.name in done for run in grid.runs)


def check_settings(grid: Grid, out: Path, results: Path) -> None:
    """Refuses a folder that holds one of these runs with other settings.

    Args:
        grid: the runs.
        out: folder of the runs' own folders.
        results: file of one line a run.

    Raises:
        UserError: for such a run, be it finished or only begun.
    """
    done = read_results(results)
    for run in grid.runs:
        path = last_checkpoint(out, run.name)
        other = run.name in done and not done[run.name].is_of(run)
        if path.exists():
            other |= bool(changed_keys(read_progress(path)[0], as_pruned(run.config, path)))
        if other:
            raise UserError(
                f"{out} holds a {run.name} that was trained with other settings: give another --out"
            )


def to_train(grid: Grid, out: Path, results: Path) -> list[Run]:
    """Runs without a result, and those whose checkpoints they need but are not there any more.

    They stay in the grid's order: of a sweep that is stopped, the first runs are to be done.

    Raises:
        UserError: for results or runs of other settings.
    """
    done = read_results(results)
    _check_results(grid, done, results)
    waiting = [run for run in grid.runs if run.name not in done]
    for run in waiting:  # it grows on the way
        _check_begun(run, out)
        needed = [r for r in grid.runs if r.name in run.needs and r not in waiting]
        waiting += [r for r in needed if not _is_trained(r, out)]
    return [run for run in grid.runs if run in waiting]


def _check_encodable(out: Path) -> None:
    """Refuses a folder that no configuration can name."""
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"cannot train in {str(out)!a}: settings are written in UTF-8, and this name can't be"
        ) from error


def _check_results(grid: Grid, done: Mapping[str, RunResult], path: Path) -> None:
    """Refuses results that are not of this grid, or not of the results beside them."""
    names = {run.name for run in grid.runs}
    for run in grid.runs:
        if run.name not in done:
            continue
        if not done[run.name].is_of(run):
            raise UserError(
                f"the result of {run.name} in {path} has other settings than are asked for: "
                "remove its line, or use another file"
            )
    others: dict[str, str] = {}  # results that go with another one than is there, and with which
    for run in grid.in_order:
        needs = done[run.name].needs if run.name in done else {}
        for need, digest in needs.items():
            gone = need not in done or done[need].digest != digest or need in others
            if need in names and gone:
                others[run.name] = others.get(need, need)
    if others:
        raise UserError(
            f"{', '.join(others)} in {path} go with another result of "
            f"{' and '.join(dict.fromkeys(others.values()))}: remove their lines to train them "
            "again, or use another file"
        )


def _check_free(runs: list[Run], out: Path) -> None:
    """Refuses to start runs that a sweep has left training when it was killed."""
    users = {run.name: user_of(out / run.name) for run in runs}
    busy = [f"{name} is still being trained by {user}" for name, user in users.items() if user]
    if busy:
        raise UserError(
            f"{' and '.join(busy)}, left by a sweep that was killed: wait for it, or stop it "
            "(it saves), then start this sweep again"
        )


def _is_trained(run: Run, out: Path) -> bool:
    """Whether its last checkpoint is there, of these settings, and not one on the way."""
    path = last_checkpoint(out, run.name)
    if not path.exists():
        return False
    config, state = read_progress(path)
    now = as_pruned(run.config, path)
    return state.epoch == config.train.total_epochs and not changed_keys(config, now)


def _check_begun(run: Run, out: Path) -> None:
    """Refuses to go on with a run from other networks than it was begun with."""
    path = last_checkpoint(out, run.name)
    if not path.exists():
        return

    def taken(paths: tuple[str | None, ...]) -> list[tuple[str, ...]]:
        # The folder of all runs may have moved; lessons lie in it, checkpoints a folder below.
        found = [Path(p).parts for p in paths if p]
        return [parts[-1:] if parts[-1].startswith(TAUGHT) else parts[-2:] for parts in found]

    begun, now = read_progress(path)[0].train, resolved(run, out).train
    if taken((begun.start, *begun.teachers)) != taken((now.start, *now.teachers)):
        raise UserError(
            f"{path.parent} was started with another start or teacher: remove or move it"
        )
