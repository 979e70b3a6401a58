"""What a run takes from trained networks."""

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import tiny_config

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.errors import UserError
from deepmoe.layers import GateHeads
from deepmoe.registry import create_model
from deepmoe.training import fit
from deepmoe.training.warm_start import channel_strengths


def test_stronger_channels_get_larger_gates() -> None:
    heads = GateHeads(3, [6, 4, 0], init="channels(0, 1)")
    before = [of_layer.clone() for of_layer in heads.weight.split(heads.widths)]
    strengths = [torch.tensor([1.0, 1, 9, 9, 5, 5]), torch.tensor([2.0, 3, 1, 0]), torch.empty(0)]
    heads.order_by_strength(strengths)
    after = heads.weight.detach().split(heads.widths)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.sort(dim=0).values, new.sort(dim=0).values)
    first = heads.weight.detach()[:6, 0]
    assert first[2:4].min() >= first[4:].max() and first[4:].min() >= first[:2].max()
    second = heads.weight.detach()[6:, 0]
    assert second[:2].min() >= second[2:].max()


def test_a_channel_is_strong_by_its_own_scale_and_by_what_reads_it() -> None:
    model = create_model("vgg11", widths=[4] * 8, classes=3, gate_last=True)
    convs = model.backbone.convs
    with torch.no_grad():
        for conv in convs:
            conv.bn.weight.fill_(1.0)
            conv.conv.weight.fill_(0.5)
        model.backbone.classifier.weight.fill_(2.0)
        convs[0].bn.weight[2] = -3.0
        convs[1].conv.weight[:, 1] = 0.0
    first, *others, last = channel_strengths(model.backbone, (32, 32))
    usual = 0.5 * (4 * 9) ** 0.5  # 4 filters of 3 x 3 read a channel
    torch.testing.assert_close(first, torch.tensor([usual, 0.0, 3 * usual, usual]))
    for strengths in others:
        torch.testing.assert_close(strengths, torch.full((4,), usual))
    torch.testing.assert_close(last, torch.full((4,), 2 * 3**0.5))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return fit(tiny_config("model.gates=none"), folder, quiet=True).checkpoint


@pytest.mark.parametrize("key", ["train.start", "train.teacher"])
def test_a_network_that_has_seen_held_out_images_is_refused(
    key: str, trained: Path, tmp_path: Path
) -> None:
    settings = (f"{key}={trained}", "model.gates=none")
    if key == "train.teacher":
        settings = (*settings, "loss.distillation=0.5")
    with pytest.raises(UserError, match=r"held out here.*data.holdout=100"):
        fit(tiny_config(*settings, "data.holdout=100"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=f"{key}: no checkpoint at nobody"):
        fit(tiny_config(*settings, f"{key}=nobody"), tmp_path / "run", quiet=True)


def test_a_teacher_of_other_classes_is_refused(trained: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(trained)
    names = tuple(f"other {i}" for i in range(checkpoint.info.classes))
    info = dataclasses.replace(checkpoint.info, class_names=names)
    path = tmp_path / "other.safetensors"
    save_checkpoint(path, checkpoint.model, checkpoint.config, info, checkpoint.state)
    settings = (f"train.teacher={path}", "loss.distillation=0.5")
    with pytest.raises(UserError, match="other names"):
        fit(tiny_config(*settings), tmp_path / "run", quiet=True)


@pytest.mark.parametrize("gates", ["inner", "all"])
@pytest.mark.parametrize("name", ["resnet20", "resnet50", "drn_a_50"])
def test_every_gated_channel_of_a_residual_network_has_a_strength(name: str, gates: str) -> None:
    backbone = create_model(name, classes=3, gates=gates).backbone
    strengths = channel_strengths(backbone, (64, 64))
    assert [len(s) for s in strengths] == list(backbone.gate_widths)
    assert all((s > 0).all() for s in strengths)


def test_outputs_of_a_residual_block_are_as_strong_as_their_scale() -> None:
    backbone = create_model("resnet20", classes=3, gates="all").backbone
    scale = torch.rand(16)
    with torch.no_grad():
        backbone.get_submodule("stages.0.0.convs.1").bn.weight.copy_(scale)
    torch.testing.assert_close(channel_strengths(backbone, (32, 32))[1], scale)


def test_gates_on_a_trained_network_open_at_its_strongest_channels(tmp_path: Path) -> None:
    dense = fit(tiny_config("model.gates=none"), tmp_path / "dense", quiet=True)
    start = (f"train.start={dense.checkpoint}", "heads.init=split(0.5)", "train.epochs=1")
    gated = fit(tiny_config(*start, "train.lr=1e-9"), tmp_path / "gated", quiet=True).model
    strengths = channel_strengths(dense.model.backbone, (8, 8))
    weights = gated.heads.weight.split(gated.heads.widths)
    for weight, strength in zip(weights, strengths, strict=True):
        is_open = (weight > 0).all(dim=1).cpu()
        assert 0 < is_open.sum() < len(is_open)
        assert strength[is_open].min() >= strength[~is_open].max()
