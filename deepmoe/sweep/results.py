"""What a sweep's runs came to: one file, a line of JSON for each run."""

import dataclasses
import functools
import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmoe.config import DataConfig, RunConfig, config_from_dict, config_to_toml
from deepmoe.errors import UserError, reason
from deepmoe.files import read_regular, write_atomically
from deepmoe.sweep.grid import Run
from deepmoe.training.fit import changed_keys

RESULTS_NAME = "runs.jsonl"
MOST_SEED = 2**63


@dataclass(frozen=True)
class RunResult:
    """A line of the file: the figures of a run, and what they were measured with."""

    line: dict[str, Any]  # as it stands there
    name: str  # of the run
    settings: dict[str, Any]  # of whatever version, without the place of the data
    figures: dict[str, Any]  # of the last epoch; `seconds` are those of all epochs
    needs: dict[str, str]  # digests of the results of the runs it took checkpoints of, by name
    digest: str  # of this one

    def is_of(self, run: Run) -> bool:
        """Whether the run would come to the same today: where and how fast it runs may differ."""
        try:
            before = config_from_dict(self.settings)
        except UserError:  # it had settings that are gone
            return False
        taken = [(c.train.start, c.train.teachers) for c in (before, run.config)]
        return taken[0] == taken[1] and not changed_keys(before, run.config)


def read_results(path: Path) -> dict[str, RunResult]:
    """The results of a sweep so far, by the names of the runs.

    Raises:
        UserError: for a file that can't be read, or a line in it that is no result.
    """
    found: dict[str, RunResult] = {}
    for number, text in enumerate(_read(path).splitlines(), start=1):
        try:
            result = _parse(text)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise UserError(
                f"line {number} of {path} is not the result of a sweep's run ({why}): "
                "remove that line, and call this again"
            ) from error
        if result.name in found:
            raise UserError(f"{path} has two results of {result.name}: remove one of the lines")
        found[result.name] = result
    return found


def add_result(
    path: Path, run: Run, metrics: list[dict[str, Any]], *, command: str, origin: dict[str, Any]
) -> None:
    """Adds the line of a finished run, with its origin and digests of those that it needed."""
    done = read_results(path)
    lost = [name for name in run.needs if name not in done]
    if lost:
        raise UserError(f"{path} has no result of {lost[0]} any more, which {run.name} needed")
    values = {
        "run": run.name,
        "config": config_to_toml(_without_root(run.config)),
        "needs": {name: done[name].digest for name in run.needs},
        "seconds": sum(line.get("seconds", 0.0) for line in metrics),
        "last": metrics[-1],
    }
    line = {"command": command, "seed": run.config.train.seed, **origin, "values": values}
    before = "".join(f"{text}\n" for text in _read(path).splitlines())
    write_atomically(path, f"{before}{json.dumps(line)}\n".encode())


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:  # there are none yet
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read results in {path}: {reason(error)}") from error


@functools.lru_cache(maxsize=4096)  # a sweep reads the same lines again after every run
def _parse(text: str) -> RunResult:
    line = json.loads(text)
    json.dumps(line, ensure_ascii=False).encode()  # half of a character can't be written again
    values = line["values"]
    for key, kind in (("seed", int), ("hardware", str)):
        if not isinstance(line[key], kind):
            raise TypeError(f"{key} can't be {line[key]!r}")
    if not 0 <= line["seed"] < MOST_SEED:
        raise ValueError(f"seed can't be {line['seed']}")
    settings = tomllib.loads(values["config"])
    config_from_dict(settings, used=True)  # of any version, but of a run
    return RunResult(
        line,
        str(values["run"]),
        settings,
        {**values["last"], "seconds": float(values["seconds"])},
        dict(values.get("needs", {})),
        hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16],
    )


def _without_root(config: RunConfig) -> RunConfig:
    """Where the data lies says nothing elsewhere."""
    data = dataclasses.replace(config.data, root=DataConfig().root)
    return dataclasses.replace(config, data=data)
