"""Runs of a comparison are measured as soon as they end: one that is stopped leaves figures."""

import dataclasses
import json
from functools import partial
from pathlib import Path

from deepmoe.comparison.measure import Finished, is_finished, measure_run
from deepmoe.config import DataConfig
from deepmoe.schema import from_plain, to_plain
from deepmoe.sweep.schedule import Job
from deepmoe.sweep.steps import Following

VERB = "measure-run"  # of the command line, where nothing else asks for it
LOG_NAME = "measuring.txt"


def measuring(run: Finished, data: DataConfig, device: str) -> Following:
    """The step that keeps a run's figures beside its checkpoint.

    Args:
        run: that has ended by then.
        data: as of `measure_run`.
        device: as train.device says.
    """
    trained = run.checkpoint.parent.name
    name = f"{trained}, measuring"

    def job() -> Job | None:
        if not is_finished(run.checkpoint):
            return None
        log, arguments = run.checkpoint.with_name(LOG_NAME), (VERB, as_text(run, data))
        return Job(name, arguments, log, device, partial(measure_run, run, data))

    return Following(name, {trained}, job)


def as_text(run: Finished, data: DataConfig) -> str:
    """What to measure, as one argument of a command."""
    plain = dataclasses.asdict(run)
    checkpoint, before = str(run.checkpoint.resolve()), [str(path.resolve()) for path in run.before]
    return json.dumps({**plain, "checkpoint": checkpoint, "before": before, "data": to_plain(data)})


def measure_from(text: str) -> None:
    """Measures what `as_text` has described."""
    plain = json.loads(text)
    data = from_plain(plain.pop("data"), DataConfig)
    before = tuple(map(Path, plain.pop("before")))
    checkpoint = Path(plain.pop("checkpoint"))
    measure_run(Finished(**plain, checkpoint=checkpoint, before=before), data)
