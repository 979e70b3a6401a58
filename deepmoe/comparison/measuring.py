"""Runs of a comparison are measured as soon as they end: one that is stopped leaves figures."""

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepmoe.comparison.measure import Finished, is_finished, measure_run
from deepmoe.config import DataConfig
from deepmoe.schema import from_plain, to_plain
from deepmoe.sweep.schedule import End, Job

VERB = "measure-run"  # of the command line, where nothing else asks for it
LOG_NAME = "measuring.txt"


@dataclass(frozen=True)
class Measuring:
    """A run that has ended is measured, and its figures are kept beside its checkpoint."""

    run: Finished
    data: DataConfig
    device: str  # as train.device says

    @property
    def name(self) -> str:
        """Of the run, and what is done with it."""
        return f"{self._trained}, measuring"

    @property
    def needs(self) -> set[str]:
        """The run."""
        return {self._trained}

    def begin(self) -> Job | None:
        """Nothing is to be done where no run has ended."""
        if not is_finished(self.run.checkpoint):
            return None
        arguments = (VERB, as_text(self.run, self.data))
        log = self.run.checkpoint.with_name(LOG_NAME)
        return Job(
            self.name, arguments, log, self.device, partial(measure_run, self.run, self.data)
        )

    def end(self, end: End) -> bool:
        """Whether it went well. If not, whoever asks for its figures next is told why."""
        return not end.code

    @property
    def _trained(self) -> str:
        return self.run.checkpoint.parent.name


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
