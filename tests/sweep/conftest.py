"""A small sweep that many tests look at, and what one starts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from small_sweeps import TINY, InThisProcess, write

from deepmoe.sweep import Grid, read_grid, sweep


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Grid, Path]:
    """Three runs, of which one starts from another and one fails; tests leave the folder alone."""
    folder = tmp_path_factory.mktemp("sweep")
    text = TINY.replace("[0, 1]", "[0]") + (
        '[runs.student]\n"train.start" = "run:dense"\n"train.teacher" = "run:dense"\n'
        '"loss.distillation" = 0.5\n[runs.dense]\n"model.gates" = "none"\n'
        '[runs.broken]\n"train.lr" = 900.0\n"train.loss_limit" = 1e-6\n'
    )
    grid = read_grid(write(folder, text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepmoe.sweep.local.Worker", InThisProcess)
        assert not sweep(grid, folder / "runs", folder / "runs.jsonl", command="test")
    return grid, folder


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """What a sweep starts, in this process: verbs and their arguments."""
    started = []

    class Noted(InThisProcess):
        def begin(self, arguments: Sequence[str], log: Path) -> None:
            started.append(list(arguments))
            super().begin(arguments, log)

    monkeypatch.setattr("deepmoe.sweep.local.Worker", Noted)
    monkeypatch.setattr("deepmoe.sweep.schedule.POLL_SECONDS", 0.0)
    monkeypatch.setattr("deepmoe.compare.taylor.JUDGED_IMAGES", 64)
    return started
