"""A run that does something to itself; in a process of its own, of course."""

import os
import signal
import sys
from pathlib import Path

from helpers import tiny_config

from deepmoe import files
from deepmoe.data import BatchLoader
from deepmoe.errors import UserError
from deepmoe.training import fit
from deepmoe.training.checkpoint_store import CheckpointStore
from deepmoe.training.log import RunLog


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def signal_at_batch(number: signal.Signals, epoch: int, batch: int, times: int = 1) -> None:
    """Sends itself a signal before this batch of this epoch."""
    original = BatchLoader.epoch

    def epoch_with_signal(self, which, start=0):
        for i, item in enumerate(original(self, which, start), start):
            if (which, i) == (epoch, batch):
                for _ in range(times):
                    send(number)
            yield item

    BatchLoader.epoch = epoch_with_signal


def before_call(owner: object, name: str, number: signal.Signals, count: int) -> None:
    """Sends itself a signal before the count-th call of a method."""
    left, original = [count], getattr(owner, name)

    def call_with_signal(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            send(number)
        return original(*arguments, **options)

    setattr(owner, name, call_with_signal)


ACTIONS = {
    "kill-batch": lambda *at: signal_at_batch(signal.SIGKILL, *at),
    "term-batch": lambda *at: signal_at_batch(signal.SIGTERM, *at),
    "term-twice": lambda *at: signal_at_batch(signal.SIGTERM, *at, times=2),
    "hup-batch": lambda *at: signal_at_batch(signal.SIGHUP, *at),
    "int-batch": lambda *at: signal_at_batch(signal.SIGINT, *at),
    # In the count-th file that is written, before it takes its name.
    "kill-write": lambda count: before_call(files.os, "fsync", signal.SIGKILL, count),
    # After the count-th checkpoint: before its metrics are written, before its other names are.
    "kill-metrics": lambda count: before_call(RunLog, "write", signal.SIGKILL, count),
    "kill-keep": lambda count: before_call(CheckpointStore, "keep_epoch", signal.SIGKILL, count),
    "term-evaluation": lambda count: before_call(BatchLoader, "__iter__", signal.SIGTERM, count),
}


def train_and(action: str, numbers: tuple[int, ...], out: Path, settings: tuple[str, ...]) -> None:
    """Trains, and does something at a place that is told by numbers.

    Args:
        action: of `ACTIONS`.
        numbers: what it takes.
        out: folder of the run.
        settings: of the run, as KEY=VALUE.
    """
    ACTIONS[action](*numbers)
    try:
        fit(tiny_config(*settings), out, resume=True, quiet=True)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
