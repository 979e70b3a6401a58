"""Processes that are forked from one that has imported everything: imports take seconds."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

START_METHOD = "forkserver"
_CONTEXT = multiprocessing.get_context(START_METHOD)
_CONTEXT.set_forkserver_preload(["deepmoe.training", "deepmoe.sweep", "sklearn.datasets"])


def call_forked(function: Callable[..., None], *arguments: object) -> int:
    """Calls a function in a process of its own; returns its exit code, as `subprocess` does."""
    process = _CONTEXT.Process(target=_call, args=(_threads(), function, arguments))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


class Forked:
    """`deepmoe` in a session of its own; of the form of `subprocess.Popen`.

    Args:
        command: of which what follows `deepmoe` counts.
        stdout: file, or a pipe if not given.
        stderr: `subprocess.STDOUT`, or a pipe of its own if not given.
        cwd: folder that it is started in.
        env: variables.
        _: what makes no difference here.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[Any] | None = None,
        stderr: int | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        **_: object,
    ) -> None:
        variables = {"OMP_NUM_THREADS": str(_threads()), **(env or os.environ)}
        self.stdout, out = _pipe() if stdout is None else (None, _writer(stdout.fileno()))
        self.stderr, err = _pipe() if stderr is None else (None, _writer(out.fileno()))
        arguments = list(command)[list(command).index("deepmoe") + 1 :]
        given = (str(cwd or os.getcwd()), variables, arguments, out, err)
        threads = int(variables["OMP_NUM_THREADS"])
        self._process = _CONTEXT.Process(target=_call, args=(threads, _deepmoe, given))
        self._process.start()
        out.close()
        err.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()


def _threads() -> int:
    return torch.get_num_threads()


def _pipe() -> tuple[IO[str], Connection]:
    reader, writer = _CONTEXT.Pipe(duplex=False)
    with reader:
        return os.fdopen(os.dup(reader.fileno())), writer


def _writer(number: int) -> Connection:
    return Connection(os.dup(number), readable=False)


def _call(threads: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that nothing has forked
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a script's background
    function(*arguments)


def _deepmoe(
    folder: str, env: dict[str, str], arguments: list[str], out: Connection, err: Connection
) -> None:
    from deepmoe.cli import main

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, writer in ((1, out), (2, err)):
        with writer:
            os.dup2(writer.fileno(), number)
    sys.argv = ["deepmoe", *arguments]
    main()
