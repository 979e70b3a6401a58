"""Loads images in worker processes, and sends signals: `signalled_workers.py ROOT ACTION`.

Ends with the loader alive and in the middle of an epoch, as a program may.
"""

import multiprocessing
import os
import signal
import sys

import torch.utils.data._utils.worker as torch_worker

from deepmoe.config import DataConfig
from deepmoe.data import open_data
from deepmoe.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
noted = []


def to_the_group() -> None:
    for number in SIGNALS:
        os.killpg(0, number)


def to_a_new_process() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def to_a_worker() -> None:
    multiprocessing.active_children()[0].kill()


def to_the_main_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nothing() -> None:
    pass


torch_worker.MP_STATUS_CHECK_INTERVAL = 0.1  # seconds between two looks for the main process
root, action = sys.argv[1:]
for number in SIGNALS:
    signal.signal(number, lambda number, _: noted.append(number))
data = open_data(DataConfig(name="image-folder", root=root, size=8, workers=2), batch_size=2)
if action == "start":
    os.register_at_fork(after_in_child=to_a_new_process)
act = {
    "start": nothing,
    "group": to_the_group,
    "worker": to_a_worker,
    "main": to_the_main_process,
}[action]
try:
    images = 0
    for epoch in range(3):
        for batch, (x, _) in enumerate(data.train.epoch(epoch)):
            images += len(x)
            if (epoch, batch) == (0, 1):
                act()
except UserError as error:
    sys.exit(f"one sentence: {error}")
unfinished = data.train.epoch(3)
next(unfinished)
print(images, sorted({signal.Signals(number).name for number in noted}))
