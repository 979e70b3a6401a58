"""Grids of thin networks, and what stands for the processes that train them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from click.testing import CliRunner

from deepmoe.cli import main

TINY = """
preset = "quickstart"
jobs = 2
seeds = [0, 1]

[settings]
"data.size" = 8
"model.widths" = [4, 4, 4, 4, 4, 4, 4, 4, 4]
"embedding.widths" = [4, 8]
"train.batch_size" = 256
"train.epochs" = 1
"train.finetune_epochs" = 0
"train.device" = "cpu"
"train.target_macs" = 0.9
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


def lines_of(results: Path) -> dict[str, dict]:
    """The lines of a file of results, by run."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["values"]["run"]: line for line in lines}


def write_lines(results: Path, *lines: dict) -> Path:
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return results


class InThisProcess:
    """Stands for a worker, without the seconds that one takes to start."""

    alive = True

    def begin(self, arguments: Sequence[str], log: Path) -> None:
        result = CliRunner().invoke(main, list(arguments))
        with log.open("a") as output:
            output.write(result.output)
        self.returned = result.exit_code

    def code(self) -> int:
        return self.returned

    def terminate(self) -> None:
        """It has ended."""

    def wait(self) -> None:
        """It has ended."""


def returning(code: int) -> Callable[[], InThisProcess]:
    """Workers that do nothing, and say this of it."""

    class Returning(InThisProcess):
        def begin(self, *_) -> None:
            self.returned = code

    return Returning
