"""Several `deepmoe` commands in one process, one after the other: starting one takes seconds.

    python -m deepmoe.cli.worker

A line on standard input is a command: its arguments, and the file that its output is added to. A
line on standard output is how it has ended.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import IO

from deepmoe.cli.verbs import main


def serve() -> None:
    """Runs commands until there are no more; one that fails is the last."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for line in sys.stdin:
        arguments, log = json.loads(line)
        code = run(arguments, log)
        with open(os.devnull, "ab") as nowhere:  # what comes next is not of this command
            _redirect(nowhere)
        try:
            answers.write(f"{code}\n")
            answers.flush()
        except BrokenPipeError:  # nobody asks any more
            os._exit(code)
        if code:  # whatever it has left behind goes with the process
            return
        _clear()


def run(arguments: Sequence[str], log: str) -> int:
    """Runs a command; returns its exit code."""
    with open(log, "ab") as output:
        _redirect(output)
    try:
        main(list(arguments), prog_name="deepmoe")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _redirect(output: IO[bytes]) -> None:
    """Sends what is printed to a file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output.fileno(), stream.fileno())


def _clear() -> None:
    """Gives back what the next command need not share its memory with."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


if __name__ == "__main__":
    serve()
