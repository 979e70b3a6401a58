"""`deepmoe` commands as processes of their own, on this machine or wherever this is called."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepmoe
from deepmoe.files import user_of

POLL_SECONDS = 0.2
# A lock on a network's storage may outlive the machine that held it, until the storage notices.
LOCK_SECONDS = 120.0

# Dies with its parent (Linux alone can do that), so that nothing trains on unseen: 1 is
# PR_SET_PDEATHSIG, 9 is SIGKILL. The parent may be gone before the kernel knows of the wish.
_LEASH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-m", "deepmoe", *sys.argv[2:]])
"""

_ORIGIN = """
import json, sys
from deepmoe.devices import choose_device
from deepmoe.results import origin
print(json.dumps(origin(choose_device(sys.argv[1]))))
"""


def threads() -> str:
    """Threads of each command, as for OMP_NUM_THREADS.

    Commands share the processors: each one asking for all of them makes all of them slow.
    """
    return os.environ.get("OMP_NUM_THREADS", "2")


def launch(
    arguments: Sequence[str],
    log: Path,
    *,
    threads: str,
    folder: str | None = None,
) -> "subprocess.Popen[bytes]":
    """Starts `deepmoe` with these arguments; it is killed when this process dies.

    Args:
        arguments: a verb and what follows it.
        log: file that its output is added to.
        threads: that it computes with.
        folder: that it is started in; the current one if not given.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _LEASH, str(os.getpid()), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            # A Ctrl-C is for this process alone: it asks the runs to stop, once, and they save.
            start_new_session=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": threads},
        )


def run_here(
    arguments: Sequence[str],
    log: str,
    *,
    own: str | None,
    threads: str,
    folder: str,
    device: str,
) -> tuple[int, dict[str, Any] | None]:
    """Runs a command to its end on the machine of a worker, and tells how that went.

    Args:
        arguments: of `deepmoe`.
        log: file that its output is added to.
        own: folder that it has to itself. It waits for a lost machine's lock on it.
        threads: that it computes with.
        folder: that it is started in, if this machine has it.
        device: that the command was asked to use.

    Returns:
        Its exit code, and where its figures were measured if it went well.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Ray cancels a task as a Ctrl-C would, to which what a script starts by & is deaf.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    deadline = time.monotonic() + LOCK_SECONDS
    while own is not None and user_of(Path(own)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    place = folder if Path(folder).is_dir() else None
    with Path(log).open("a", encoding="utf-8") as file:
        file.write(f"on {platform.node()}, by process {os.getpid()}\n")
    process = launch(arguments, Path(log), threads=threads, folder=place)
    try:
        while process.poll() is None:  # a wish to stop is heard between two looks
            time.sleep(POLL_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # if it still runs: it saves
        process.wait()
    return process.returncode, None if process.returncode else _origin(device)


def sees(marker: str, content: str) -> str | None:
    """Which deepmoe this machine has, if it finds the file of another one with its content."""
    try:
        found = Path(marker).read_text(encoding="utf-8")
    except OSError:
        return None
    return deepmoe.__version__ if found == content else None


def _origin(device: str) -> dict[str, Any]:
    """Asked in a process of its own: this one is to stay small, and off the GPU."""
    command = [sys.executable, "-c", _ORIGIN, device]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(told)
