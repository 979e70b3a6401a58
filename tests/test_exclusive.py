"""Folders that one process has to itself."""

import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepmoe.errors import UserError
from deepmoe.files import exclusive

HOLD = """
import sys, time
from pathlib import Path
from deepmoe.files import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_free_once_its_process_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with (
            pytest.raises(UserError, match=f"is in use by process {process.pid} on "),
            exclusive(folder),
        ):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with exclusive(folder):
        pass


def test_a_folder_is_free_after_a_failure_though_a_child_still_has_its_handle(
    tmp_path: Path,
) -> None:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path):
        worker.start()
        raise ZeroDivisionError
    with exclusive(tmp_path):
        assert worker.is_alive()
    worker.kill()
    worker.join()
