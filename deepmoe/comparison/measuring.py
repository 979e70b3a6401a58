"""Runs of a comparison are measured as soon as they end: one that is stopped leaves figures."""

import dataclasses
import json
from functools import partial
from pathlib import Path

from deepmoe.comparison.measure import Finished, is_finished, measure_run
from deepmoe.config import DataConfig
from deepmoe.errors import UserError
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
        # Whoever runs it may be in another folder, on another machine.
        log = run.checkpoint.absolute().with_name(LOG_NAME)
        return Job(name, (VERB, as_text(run, data)), log, device, partial(measure_run, run, data))

    return Following(name, {trained}, job)


def as_text(run: Finished, data: DataConfig) -> str:
    """What to measure, as one argument of a command."""
    plain = dataclasses.asdict(run)
    checkpoint = str(run.checkpoint.absolute())  # not where a link leads: figures lie beside it
    before = [str(path.absolute()) for path in run.before]
    return json.dumps({**plain, "checkpoint": checkpoint, "before": before, "data": to_plain(data)})


def measure_from(text: str) -> None:
    """Measures what `as_text` has described.

    Raises:
        UserError: for any other text.
    """
    try:
        plain = json.loads(text)
        data = from_plain(plain.pop("data"), DataConfig)
        before = tuple(map(Path, plain.pop("before")))
        checkpoint = Path(plain.pop("checkpoint"))
        run = Finished(**plain, checkpoint=checkpoint, before=before)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{VERB} is for `deepmoe compare` to call, with its run") from error
    measure_run(run, data)
