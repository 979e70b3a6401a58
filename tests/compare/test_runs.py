"""The new methods on other networks, and in training runs that stop and go on."""

import shutil
from pathlib import Path

import pytest
import torch
from compare_networks import Mobile, Residual, loader, small_images, task_of
from helpers import randomise_statistics, tiny_config
from safetensors.torch import load_file
from torch import nn

from deepmoe.checkpoint import load_checkpoint
from deepmoe.compare import SELECTORS, depgraph
from deepmoe.config import RunConfig
from deepmoe.costs import count_costs, dense_macs
from deepmoe.pruning import prune
from deepmoe.registry import create_model
from deepmoe.training import FitResult, fit

METHODS = ("he", "thinet", "depgraph")
WIDTHS = "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]"


@torch.no_grad()
@pytest.mark.parametrize("by", METHODS)
@pytest.mark.parametrize("options", [{"wide": 0.5}, {"block": "basic", "wide": 0.0625}])
def test_a_residual_network_keeps_its_streams(by: str, options: dict[str, object]) -> None:
    name = "resnet18_cifar" if "block" in options else "resnet20"
    model = randomise_statistics(create_model(name, classes=4, gates=None, **options).eval())
    images = torch.randn(40, 3, 32, 32)
    small = prune(model, 32, 0.6, loader(images), by=by)
    assert 0.5 < count_costs(small, 32).macs / dense_macs(model, 32) <= 0.6
    for old, new in zip(model.gating.graph.groups, small.gating.graph.groups, strict=True):
        assert new.width == old.width if old.is_stream else new.width <= old.width
    assert small(images).logits.isfinite().all()
    given = prune(model, 32, None, loader(images), by=by, widths=small.source.kept)
    assert given.source.kept == small.source.kept


@torch.no_grad()
@pytest.mark.parametrize("by", METHODS)
def test_depthwise_convolutions_gates_and_several_readers(by: str) -> None:
    task = task_of(Mobile(), small_images(60), share=0.5)
    choice = SELECTORS[by](task)
    small, _, _ = task.gating.narrow(choice.network or task.model.network, choice.masks)
    assert small.depthwise.groups < 12 and small(small_images(3)).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("by", METHODS)
def test_streams_lose_channels_where_widths_say_so(by: str) -> None:
    task = task_of(Residual(), small_images(60), widths={"stem": 2, "blocks.0.conv1": 4})
    choice = SELECTORS[by](task)
    masks = dict(zip(task.gating.names, choice.masks, strict=True))
    assert masks["stem"].sum() == 2 and masks["blocks.0.conv1"].sum() == 4
    small, _, _ = task.gating.narrow(choice.network or task.model.network, choice.masks)
    assert small(small_images(3)).isfinite().all()


@torch.no_grad()
def test_depgraph_scores_all_weights_of_a_channel() -> None:
    """Squares of the filter, the norm's scale and what reads the channel: means of one are 1."""
    task = task_of(Residual(), small_images(4), widths={"blocks.1.conv1": 3})
    block = task.model.network.blocks[1]
    parts = torch.stack(
        [
            block.conv1.weight.square().sum(dim=(1, 2, 3)),
            block.bn1.weight.square(),
            block.conv2.weight.square().sum(dim=(0, 2, 3)),
        ]
    )
    expected = parts.mean(dim=0) / parts.mean()
    found = dict(zip(task.gating.names, depgraph.group_norms(task), strict=True))
    torch.testing.assert_close(found["blocks.1.conv1"], expected)
    assert not found["blocks.0.conv1"].any()  # keeps all


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    config = tiny_config("model.gates=none", "train.epochs=1", "train.finetune_epochs=0", WIDTHS)
    return fit(config, tmp_path_factory.mktemp("start"), quiet=True)


def pruning(start: FitResult, by: str) -> RunConfig:
    return tiny_config(
        f"train.start={start.checkpoint}",
        "train.prune=0.7",
        f"train.prune_by={by}",
        "model.gates=none",
        "train.epochs=2",
        "train.finetune_epochs=0",
        WIDTHS,
    )


@pytest.mark.parametrize("by", METHODS)
def test_a_run_prunes_and_goes_on_where_it_was_stopped(
    by: str, start: FitResult, tmp_path: Path
) -> None:
    whole = fit(pruning(start, by), tmp_path / "whole", quiet=True)
    assert 0.55 < whole.evaluation.macs_share <= 0.7
    assert load_checkpoint(whole.checkpoint).model.source.kept == whole.model.source.kept
    again = tmp_path / "again"
    again.mkdir()
    first = whole.checkpoint.with_name("epoch-0001.safetensors")
    shutil.copy(first, again / whole.checkpoint.name)
    resumed = fit(pruning(start, by), again, resume=True, quiet=True)
    left, right = load_file(resumed.checkpoint), load_file(whole.checkpoint)
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_training_mode_of_parts_stays(start: FitResult) -> None:
    model = load_checkpoint(start.checkpoint).model.train()
    norm = next(m for m in model.network.modules() if isinstance(m, nn.BatchNorm2d))
    norm.eval()
    small = prune(model, 8, 0.7, loader(torch.randn(40, 3, 8, 8)), by="he")
    assert model.network.training and not norm.training and small.network.training
