"""Trains, and kills itself with SIGKILL at a chosen point: `killed_run.py OUT POINT N [N]`."""

import os
import signal
import sys

from helpers import tiny_config

from deepmoe.data import BatchLoader
from deepmoe.training import checkpoint, fit


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_batch(epoch: int, batch: int) -> None:
    """Dies before this batch of this epoch."""
    original = BatchLoader.epoch

    def epoch_until_death(self, number, start=0):
        for i, item in enumerate(original(self, number, start), start):
            if (number, i) == (epoch, batch):
                die()
            yield item

    BatchLoader.epoch = epoch_until_death


def die_at_write(count: int) -> None:
    """Dies in the count-th file that is written, before it takes its name."""
    left = [count]
    original = os.fsync

    def fsync_until_death(descriptor):
        left[0] -= 1
        if left[0] == 0:
            die()
        original(descriptor)

    checkpoint.os.fsync = fsync_until_death


if __name__ == "__main__":
    out, point, *numbers = sys.argv[1:]
    {"batch": die_at_batch, "write": die_at_write}[point](*map(int, numbers))
    fit(tiny_config(), out, resume=True, quiet=True)
