"""Channels that are removed for good: what is left, and what it costs."""

from pathlib import Path

import pytest
import torch
from helpers import counted_macs, randomise_statistics
from prunable_networks import CLASSES, IMAGES, LABELS, NETWORKS, Small, dense, loader

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.configured_models import config_of
from deepmoe.costs import count_costs, count_macs, dense_macs
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.evaluation.importance import channel_importance
from deepmoe.graph import channel_strengths, prunable
from deepmoe.pruning import prune, prune_module
from deepmoe.registry import create_model


@torch.no_grad()
@pytest.mark.parametrize("by", ["taylor", "strength"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_left_computes_what_the_network_does_with_other_gates_closed(
    name: str, by: str
) -> None:
    model = dense(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gating = prunable(model.gating.graph)
    if by == "taylor":
        importance = channel_importance(model, gating, loader().epoch(0), len(IMAGES))
    else:
        importance = torch.cat(channel_strengths(model.network, gating))
    small = prune(model, 32, 0.5, loader(), by=by)
    kept = small.source.kept
    gates = []
    for part, count in zip(importance.split(list(gating.widths)), kept, strict=True):
        least = part.sort(descending=True).values[count - 1]
        gates.append((part >= least).float().expand(len(IMAGES), -1))
    torch.testing.assert_close(
        small(IMAGES).logits, gating(model.network, IMAGES, gates), rtol=1e-4, atol=1e-4
    )
    assert any(left < width for left, width in zip(kept, gating.widths, strict=True))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    for parameter in small.network.parameters():  # of its own
        parameter.zero_()
    assert model.network.get_parameter(
        "conv1.weight" if "res" in name else "features.0.weight"
    ).any()


@torch.no_grad()
@pytest.mark.parametrize("by", ["he", "thinet", "taylor", "li"])
def test_any_network_is_pruned_by_batches_of_ones_own(by: str) -> None:
    network = randomise_statistics(Small()).eval()
    data = torch.utils.data.TensorDataset(IMAGES[:, :, :8, :8], LABELS)
    batches = torch.utils.data.DataLoader(data, batch_size=4)
    small = prune_module(network, IMAGES[:2, :, :8, :8], 0.6, batches, by=by)
    assert isinstance(small, Small) and not small.training
    one = IMAGES[:1, :, :8, :8]
    assert 0.4 < counted_macs(small, one) / counted_macs(network, one) <= 0.6
    assert network.one.weight.shape[0] == 4  # it is left as it is


def test_what_can_not_be_pruned_from_python_gets_one_sentence() -> None:
    with pytest.raises(UserError, match="use prune_module for any other network"):
        prune(Small(), 8, 0.5, loader())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"by one of li, .* not by 'magic'"):
        prune(dense("vgg11"), 32, 0.5, loader(), by="magic")  # type: ignore[arg-type]
    for wrong in ({"tilt": None}, {"tilt": 2}, {"seed": -1}, {"share": "a"}):
        with pytest.raises(UserError, match="number from 0"):
            prune(dense("vgg11"), 32, **{"share": 0.5, "judged_by": loader(), **wrong})
    images = IMAGES[:, :, :8, :8]
    for batches, words in (
        (None, "give a DataLoader"),
        (iter([(images, LABELS)]), "give a DataLoader"),
        ([images], "pair of tensors"),
        ([{"images": images}], "pair of tensors"),
        ([(images * float("nan"), LABELS)], "not finite"),
        ([(images, LABELS + 100)], "labels are from 0 to"),
        ([(images, LABELS[:1])], "a label for each"),
    ):
        with pytest.raises(UserError, match=words):
            prune_module(Small().eval(), images[:2], 0.6, batches, by="he")
    with (
        torch.inference_mode(),
        pytest.raises(UserError, match=r"outside of torch\.inference_mode"),
    ):
        prune_module(Small().eval(), images[:2], 0.6, [(images, LABELS)], by="taylor")
    for share, widths in ((None, None), (0.5, [4] * 8)):
        with pytest.raises(UserError, match="a share of the MACs or widths, not both"):
            prune(dense("vgg11"), 32, share, loader(), widths=widths)


@torch.no_grad()
def test_costs_are_of_what_is_left_and_shares_of_the_whole() -> None:
    model = dense("resnet18_cifar")
    small = prune(model, 32, 0.4, loader())
    one = IMAGES[:1]
    whole, left = counted_macs(model.network, one), counted_macs(small.network, one)
    assert dense_macs(small, 32) == dense_macs(model, 32) == whole
    assert count_macs(small, 32) == count_costs(small, 32).macs == left
    assert 0.35 * whole < left <= 0.4 * whole


def test_residual_streams_go_where_nothing_relies_on_them() -> None:
    streams = {
        name: [g for g in dense(name).gating.graph.groups if g.is_stream] for name in NETWORKS
    }
    assert not streams["vgg11"]
    for name, pinned in (("resnet18_cifar", False), ("resnet20", True)):
        model = dense(name)
        small = prune(model, 32, 0.5, loader(), tilt=0)
        for group in streams[name]:
            left = small.gating.graph.groups[group.number].width
            assert left == group.width if pinned else left < group.width


def test_gated_and_pruned_networks_are_refused() -> None:
    gated = create_model("vgg11", classes=CLASSES, widths=[8] * 8)
    with pytest.raises(UserError, match="prune the network, then gate what is left"):
        prune(gated, 32, 0.5, loader())
    small = prune(dense("vgg11"), 32, 0.5, loader())
    with pytest.raises(UserError, match="pruned already"):
        prune(small, 32, 0.5, loader())


@torch.no_grad()
@pytest.mark.parametrize("exits", [False, True])
def test_a_checkpoint_gives_back_what_is_left(exits: bool, tmp_path: Path) -> None:
    small = prune(dense("resnet18_cifar", exits=exits), 32, 0.5, loader())
    if exits:
        small.exit_at = torch.tensor(0.21)
    info = DataInfo(tuple("abcde"), (32, 32), (0.5,) * 3, (0.5,) * 3)
    path = tmp_path / "small.safetensors"
    save_checkpoint(path, small, config_of(small), info, TrainState())
    loaded = load_checkpoint(path).model
    assert torch.equal(loaded(IMAGES).logits, small(IMAGES).logits)
    assert loaded.source.kept == small.source.kept
    assert dense_macs(loaded, 32) == dense_macs(small, 32) > count_costs(loaded, 32).macs
    with pytest.raises(UserError, match="pruned already"):
        prune(loaded, 32, 0.5, loader())


@pytest.mark.parametrize("kept", [(8,), (9, 8, 8, 8, 8, 8, 8, 8), (0, 8, 8, 8, 8, 8, 8, 8)])
def test_numbers_of_channels_that_do_not_fit_are_refused(kept: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"one number for each of 8 groups of channels, at most"):
        create_model("vgg11", classes=CLASSES, gates=None, widths=[8] * 8, kept=kept)
