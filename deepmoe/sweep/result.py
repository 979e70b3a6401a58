"""The result of a sweep's run: its figures, and what they were measured with."""

import dataclasses
import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepmoe.config import DataConfig, RunConfig, config_from_dict, config_to_toml
from deepmoe.errors import UserError
from deepmoe.results import write_result
from deepmoe.sweep.grid import Run


@dataclass(frozen=True)
class RunResult:
    """What a run came to."""

    config: RunConfig  # without the place of the data
    seconds: float  # of all its epochs
    last: dict[str, Any]  # metrics of the last epoch
    needs: dict[str, str]  # digests of the results of the runs it took checkpoints of, by name
    digest: str  # of this one


def result_path(results: Path, run: Run) -> Path:
    """Where a run's figures are."""
    return results / f"{run.name}.json"


def read_run_result(path: Path) -> RunResult:
    """Reads the result of a run.

    Raises:
        UserError: for a file that is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["values"]
        config = config_from_dict(tomllib.loads(values["config"]))
        needs, last = dict(values.get("needs", {})), dict(values["last"])
        text = json.dumps(values, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return RunResult(config, float(values["seconds"]), last, needs, digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the result of a sweep's run: {error}") from error


def write_run_result(
    path: Path, run: Run, lines: list[dict[str, Any]], *, command: str, device: torch.device
) -> None:
    """Writes the metrics of a finished run, next to the results of those it needed."""
    beside = {name: path.with_name(f"{name}.json") for name in run.needs}
    values = {
        "run": run.name,
        "config": config_to_toml(without_root(run.config)),
        "needs": {name: read_run_result(needed).digest for name, needed in beside.items()},
        "seconds": sum(line.get("seconds", 0.0) for line in lines),
        "last": lines[-1],
    }
    write_result(path, values, command=command, seed=run.config.train.seed, device=device)


def without_root(config: RunConfig) -> RunConfig:
    """Where the data lies says nothing elsewhere."""
    data = dataclasses.replace(config.data, root=DataConfig().root)
    return dataclasses.replace(config, data=data)
