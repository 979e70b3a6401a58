"""Runs that prune the network they start from."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import assert_same_weights, tiny_config
from torch import Tensor

from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import RunConfig, load_config
from deepmoe.costs import count_costs, dense_macs
from deepmoe.data import open_data
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.graph import channel_strengths
from deepmoe.pruning import prune
from deepmoe.training import FitResult, fit
from deepmoe.training.trainer import Trainer

WIDTHS = "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]"
ONE_EPOCH = ("train.epochs=1", "train.finetune_epochs=0", WIDTHS)
STILL = (*ONE_EPOCH, "train.lr=1e-12", "train.weight_decay=0")


@pytest.fixture(scope="module", autouse=True)
def _few_are_judged() -> Iterator[None]:
    """Runs judge channels by fewer images than they would, to be done soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepmoe.compare.taylor.JUDGED_IMAGES", 256)
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    config = tiny_config("model.gates=none", *ONE_EPOCH)
    return fit(config, tmp_path_factory.mktemp("start"), quiet=True)


def pruning(start: FitResult, *settings: str) -> RunConfig:
    """Two epochs of what is left of a start."""
    taken = (f"train.start={start.checkpoint}", "train.prune=0.7", "model.gates=none", WIDTHS)
    return tiny_config(*taken, "train.epochs=2", "train.finetune_epochs=0", *settings)


@pytest.fixture(scope="module")
def whole_run(start: FitResult, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return fit(pruning(start), tmp_path_factory.mktemp("pruned"), quiet=True)


def test_a_run_begins_with_what_is_left_of_its_start(start: FitResult, tmp_path: Path) -> None:
    by = ("train.prune_by=strength", "train.prune_tilt=0")
    run = fit(pruning(start, *by, *STILL), tmp_path, quiet=True)
    config = tiny_config()
    data = open_data(config.data, batch_size=config.train.batch_size)
    trained = load_checkpoint(start.checkpoint).model
    small = prune(trained, data.info.size, 0.7, data.train, by="strength", tilt=0)
    assert run.model.source.kept == small.source.kept
    expected = dict(small.network.named_parameters())
    for name, parameter in run.model.network.named_parameters():
        torch.testing.assert_close(parameter, expected[name])


def test_a_runs_figures_are_shares_of_the_whole_network(
    start: FitResult, whole_run: FitResult
) -> None:
    result = whole_run.evaluation
    assert result.dense_macs == start.evaluation.dense_macs
    assert result.macs == count_costs(whole_run.model, whole_run.data.info.size).macs
    assert 0.6 < result.macs_share <= 0.7
    loaded = load_checkpoint(whole_run.checkpoint)
    assert loaded.config.model.kept == loaded.model.source.kept == whole_run.model.source.kept
    assert dense_macs(loaded.model, loaded.info.size) == result.dense_macs


def after_the_first_epoch(run: FitResult, folder: Path) -> Path:
    """A folder of the same run, as one that was killed after its first epoch has left it."""
    folder.mkdir()
    first = run.checkpoint.with_name("epoch-0001.safetensors")
    shutil.copy(first, folder / run.checkpoint.name)
    return folder


def stop_before(batch: int, patch: pytest.MonkeyPatch) -> None:
    """Has the process sent a signal before it trains on this batch of an epoch."""
    original = Trainer._training_batches

    def batches(self: Trainer, epoch: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        for i, item in enumerate(original(self, epoch, start), start):
            if i == batch:
                signal.raise_signal(signal.SIGTERM)
            yield item

    patch.setattr(Trainer, "_training_batches", batches)


@pytest.mark.parametrize("stopped", ["within an epoch", "after an epoch"])
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    stopped: str, start: FitResult, whole_run: FitResult, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    if stopped == "after an epoch":
        after_the_first_epoch(whole_run, out)
    else:
        with pytest.MonkeyPatch.context() as patch:
            stop_before(2, patch)
            with pytest.raises(TrainingInterrupted, match="--resume goes on"):
                fit(pruning(start), out, resume=True, quiet=True)
        state = load_checkpoint(out / "last.safetensors").state
        assert (state.epoch, state.batch) == (0, 3)
    resumed = fit(pruning(start), out, resume=True, quiet=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert resumed.evaluation == whole_run.evaluation
    with pytest.raises(UserError, match=r"other settings of train\.prune$"):
        fit(pruning(start, "train.prune=0.8"), out, resume=True, quiet=True)


def test_the_configuration_that_a_run_leaves_gives_the_same_run(
    whole_run: FitResult, tmp_path: Path
) -> None:
    left = load_config(whole_run.checkpoint.with_name("config.toml"))
    assert left.model.kept is not None
    again = fit(left, tmp_path, quiet=True)
    assert_same_weights(again.checkpoint, whole_run.checkpoint)


def test_what_is_left_can_be_gated(start: FitResult, tmp_path: Path) -> None:
    taken = (f"train.start={start.checkpoint}", "train.prune=0.7", "heads.init=split(0.5)")
    run = fit(tiny_config(*taken, *STILL), tmp_path / "gated", quiet=True)
    model, kept = run.model, run.model.source.kept
    assert model.gated and model.gating.widths == kept and sum(kept) < 9 * 8
    assert run.evaluation.dense_macs == start.evaluation.dense_macs
    for weight, strengths in zip(
        model.heads.weight.split(kept), channel_strengths(model.network, model.gating), strict=True
    ):
        is_open = (weight > 0).all(dim=1)
        assert 0 < is_open.sum() < len(is_open)
        assert strengths[is_open].min() >= strengths[~is_open].max()
    loaded = load_checkpoint(run.checkpoint).model
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(loaded(x).logits, model(x).logits)


def test_a_budget_counts_what_pruning_has_saved(start: FitResult, tmp_path: Path) -> None:
    taken = (f"train.start={start.checkpoint}", "train.prune=0.7", "train.target_macs=0.5")
    result = fit(tiny_config(*taken, *ONE_EPOCH), tmp_path, quiet=True).evaluation
    assert result.dense_macs == start.evaluation.dense_macs
    assert 0.45 < result.macs_share < 0.55


def test_what_a_run_can_not_prune_gets_one_sentence(
    start: FitResult, whole_run: FitResult, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"can't leave 0\.01 of the MACs"):
        fit(pruning(start, "train.prune=0.01"), tmp_path / "a", quiet=True)
    with pytest.raises(UserError, match="different layers or widths"):
        fit(pruning(whole_run), tmp_path / "b", quiet=True)
    with pytest.raises(UserError, match="pruned before fit"):
        model = load_checkpoint(start.checkpoint).model
        fit(model, None, None, pruning(start), tmp_path / "c", quiet=True)
    assert not list(tmp_path.iterdir())
