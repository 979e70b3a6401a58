"""Trains, and does something to itself at a chosen point: `killed_run.py OUT ACTION N [N]`."""

import os
import signal
import sys

from helpers import tiny_config

from deepmoe.data import BatchLoader
from deepmoe.errors import UserError
from deepmoe.training import checkpoint, fit


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def signal_at_batch(number: signal.Signals, epoch: int, batch: int) -> None:
    """Sends itself a signal before this batch of this epoch."""
    original = BatchLoader.epoch

    def epoch_with_signal(self, which, start=0):
        for i, item in enumerate(original(self, which, start), start):
            if (which, i) == (epoch, batch):
                send(number)
            yield item

    BatchLoader.epoch = epoch_with_signal


def kill_at_write(count: int) -> None:
    """Dies in the count-th file that is written, before it takes its name."""
    left = [count]
    original = os.fsync

    def fsync_until_death(descriptor):
        left[0] -= 1
        if left[0] == 0:
            send(signal.SIGKILL)
        original(descriptor)

    checkpoint.os.fsync = fsync_until_death


ACTIONS = {
    "kill-batch": lambda *at: signal_at_batch(signal.SIGKILL, *at),
    "term-batch": lambda *at: signal_at_batch(signal.SIGTERM, *at),
    "hup-batch": lambda *at: signal_at_batch(signal.SIGHUP, *at),
    "int-batch": lambda *at: signal_at_batch(signal.SIGINT, *at),
    "kill-write": kill_at_write,
}

if __name__ == "__main__":
    out, action, *numbers = sys.argv[1:]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup
    ACTIONS[action](*map(int, numbers))
    try:
        fit(tiny_config(), out, resume=True, quiet=True)
    except UserError as error:
        sys.exit(error.exit_code)
