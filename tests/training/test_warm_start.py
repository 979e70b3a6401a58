"""What a run takes from trained networks."""

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from torch import nn

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.errors import UserError
from deepmoe.graph import channel_strengths
from deepmoe.layers import GateHeads
from deepmoe.registry import create_model
from deepmoe.training import fit


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
    features = model.network.features
    with torch.no_grad():
        for module in features:
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
                module.weight.fill_(0.5 if isinstance(module, nn.Conv2d) else 1.0)
        model.network.classifier.weight.fill_(2.0)
        features[1].weight[2] = -3.0  # the norm behind the first convolution
        features[4].weight[:, 1] = 0.0  # the second convolution
    first, *others, last = channel_strengths(model.network, model.gating)
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
    model = create_model(name, classes=3, gates=gates)
    strengths = channel_strengths(model.network, model.gating)
    assert [len(s) for s in strengths] == list(model.gating.widths)
    assert all((s > 0).all() for s in strengths)


def test_a_residual_stream_is_strong_by_all_that_makes_and_reads_it() -> None:
    model = create_model("resnet18", classes=3, gates="all")
    network = model.network
    norms = [network.bn1, network.layer1[0].bn2, network.layer1[1].bn2]
    after = network.layer2[0]
    readers = [network.layer1[0].conv1, network.layer1[1].conv1, after.conv1, after.downsample[0]]
    for norm in norms:
        nn.init.normal_(norm.weight)
    scale = torch.stack([norm.weight.detach().abs() for norm in norms]).mean(dim=0)
    read = torch.cat([conv.weight.detach().transpose(0, 1).flatten(1) for conv in readers], dim=1)
    strengths = channel_strengths(network, model.gating)
    assert model.gating.names[0] == "conv1"
    torch.testing.assert_close(strengths[0], scale * read.norm(dim=1))


def test_gates_on_a_trained_network_open_at_its_strongest_channels(tmp_path: Path) -> None:
    dense = fit(tiny_config("model.gates=none"), tmp_path / "dense", quiet=True)
    start = (f"train.start={dense.checkpoint}", "heads.init=split(0.5)", "train.epochs=1")
    gated = fit(tiny_config(*start, "train.lr=1e-9"), tmp_path / "gated", quiet=True).model
    strengths = channel_strengths(dense.model.network, dense.model.gating)
    weights = gated.heads.weight.split(gated.heads.widths)
    for weight, strength in zip(weights, strengths, strict=True):
        is_open = (weight > 0).all(dim=1).cpu()
        assert 0 < is_open.sum() < len(is_open)
        assert strength[is_open].min() >= strength[~is_open].max()
