"""How `deepmoe` is called in the tests' own process, and what it says of mistakes."""

from click.testing import CliRunner, Result
from helpers import TINY_RUN

from deepmoe.cli import main

QUICK = [arg for item in TINY_RUN for arg in ("--set", item)]


def deepmoe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def assert_refused(result: Result, *words: str) -> None:
    """One clear sentence on stderr, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    for word in words:
        assert word in lines[0]
