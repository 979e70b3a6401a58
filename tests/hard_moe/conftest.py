"""A start that is pruned, and a run of experts that begins with it; tests leave both alone."""

import pytest
from expert_models import mixture
from helpers import tiny_config

from deepmoe.training import FitResult, fit


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    folder = tmp_path_factory.mktemp("start")
    plain = ("model.gates=none", "train.epochs=1", "train.finetune_epochs=0")
    whole = fit(tiny_config(*plain), folder / "whole", quiet=True)
    pruned = ("train.prune=0.5", "train.prune_by=strength", f"train.start={whole.checkpoint}")
    return fit(tiny_config(*plain, *pruned), folder / "pruned", quiet=True)


@pytest.fixture(scope="session")
def whole_run(start: FitResult, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return fit(mixture(start), tmp_path_factory.mktemp("mixture"), quiet=True)
