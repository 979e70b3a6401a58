"""Channels that are removed for good: which ones, how many of each group, and what is left."""

import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import counted_macs, randomise_statistics, tiny_config
from safetensors.torch import load_file
from torch import Tensor, nn

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.compare.widths import widths_for
from deepmoe.config import RunConfig, load_config
from deepmoe.configured_models import config_of
from deepmoe.costs import cost_matrix, count_costs, count_macs, dense_macs, macs_of_counts
from deepmoe.data import DataInfo, open_data
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.evaluation.importance import channel_importance
from deepmoe.graph import Gating, channel_strengths, describe, prunable
from deepmoe.model import DeepMoE
from deepmoe.pruning import prune, prune_module
from deepmoe.registry import create_model
from deepmoe.training import FitResult, fit
from deepmoe.training.trainer import Trainer

CLASSES = 5
IMAGES, LABELS = torch.randn(12, 3, 32, 32), torch.arange(12) % CLASSES


def loader(images: Tensor = IMAGES, labels: Tensor = LABELS) -> SimpleNamespace:
    """Stands for a loader of training images, in two batches."""
    parts = list(zip(images.split(8), labels.split(8), strict=True))
    return SimpleNamespace(epoch=lambda number: iter(parts))


NETWORKS = {
    "vgg11": {"widths": [8] * 8},
    "resnet20": {"wide": 0.5},
    "resnet18_cifar": {"block": "basic", "wide": 0.0625},
}


def dense(name: str, **options: object) -> DeepMoE:
    torch.manual_seed(0)
    made = create_model(name, classes=CLASSES, gates=None, **NETWORKS[name], **options).eval()
    return randomise_statistics(made)


class Small(nn.Module):
    """Two convolutions that make 4 and 6 channels, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.two = nn.Conv2d(4, 6, 3)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.one(x)))
        return self.fc(F.relu(self.two(y)).mean(dim=(2, 3)))


def test_importance_is_what_the_loss_feels_of_a_gate_at_temperature_4() -> None:
    network, x = randomise_statistics(Small()).double().eval(), IMAGES[:, :, :8, :8].double()
    nn.init.zeros_(network.two.weight[:, 2])  # nobody reads this channel
    graph = describe(network, x)
    gating = prunable(graph)
    assert gating.widths == (4, 6)
    model = DeepMoE(None, None, network.train(), gating)

    expected = torch.zeros(10, dtype=torch.float64)
    network.eval()
    for image, label in zip(x[:10], LABELS[:10], strict=True):  # one by one
        gates = torch.ones(10, dtype=torch.float64, requires_grad=True)
        y = F.relu(network.norm(network.one(image[None]))) * gates[:4, None, None]
        y = F.relu(network.two(y)).mean(dim=(2, 3)) * gates[4:]
        loss = F.cross_entropy(network.fc(y) / 4, label[None])
        expected += torch.autograd.grad(loss, gates)[0].abs()
    network.train()

    found = channel_importance(model, gating, loader(x).epoch(0), 10)  # not all 12
    torch.testing.assert_close(found, expected)
    assert found[2] == 0 < found[[0, 1, 3]].min()
    assert network.training and all(p.grad is None for p in network.parameters())


@pytest.fixture(scope="module", autouse=True)
def _few_are_judged() -> Iterator[None]:
    """Runs judge channels by fewer images than they would, to be done soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepmoe.compare.taylor.JUDGED_IMAGES", 256)
        yield


@pytest.fixture(scope="module")
def wide() -> Gating:
    with torch.device("meta"):
        return prunable(create_model("vgg16", gates=None).gating.graph)


def macs(gating: Gating, widths: Sequence[float]) -> float:
    counts = torch.tensor([widths], dtype=torch.float64)
    return macs_of_counts(counts, cost_matrix(gating, 32)).item()


def random_importance(gating: Gating) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(len(gating.widths), generator=generator) * 4
    return [
        torch.rand(width, generator=generator, dtype=torch.float64) * 10**scale
        for width, scale in zip(gating.widths, spread.tolist(), strict=True)
    ]


@pytest.mark.parametrize("tilt", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.3, 0.12, 0.05])
def test_widths_meet_the_cost_and_come_near_it(wide: Gating, share: float, tilt: float) -> None:
    kept = widths_for(wide, 32, random_importance(wide), share, tilt)
    assert all(1 <= left <= width for left, width in zip(kept, wide.widths, strict=True))
    found = macs(wide, kept) / macs(wide, wide.widths)
    assert 0.85 * share <= found <= share  # groups of one width step together
    odd = [left for left, width in zip(kept, wide.widths, strict=True) if left % 4 and left < width]
    assert not odd


def test_without_a_tilt_every_group_keeps_about_the_same_share(wide: Gating) -> None:
    full = torch.tensor(wide.widths)
    importance = random_importance(wide)
    even, tilted, steep = (
        torch.tensor(widths_for(wide, 32, importance, 0.25, tilt)) / full for tilt in (0, 0.5, 1)
    )
    assert even.max() - even.min() <= 4 / 64  # to what is rounded
    assert even.std() < tilted.std() < steep.std()


def test_with_a_full_tilt_groups_keep_what_is_worth_more_for_each_mac(wide: Gating) -> None:
    """Importance in proportion to cost: all groups are alike, but for one made dear or cheap."""
    quadratic, full = cost_matrix(wide, 32), torch.tensor([*wide.widths, 1.0]).double()
    costs = ((quadratic + quadratic.T) @ full)[:-1]
    generator = torch.Generator().manual_seed(0)
    alike = [
        cost * torch.rand(width, generator=generator, dtype=torch.float64)
        for cost, width in zip(costs, wide.widths, strict=True)
    ]

    def kept(factor: float, tilt: float) -> float:
        """The share that the sixth group keeps when it is worth this much more."""
        importance = [part * (factor if i == 5 else 1) for i, part in enumerate(alike)]
        return widths_for(wide, 32, importance, 0.5, tilt)[5] / wide.widths[5]

    assert kept(0.1, 1) < 0.5 * kept(1, 1) and kept(1, 1) < 0.8 * kept(10, 1)
    assert kept(0.1, 0) == kept(1, 0) == kept(10, 0)


def test_a_share_out_of_reach_gets_one_sentence(wide: Gating) -> None:
    importance = random_importance(wide)
    for share in (0.0001, 1.1):
        with pytest.raises(UserError, match=r"goes from 1 down to 0\.00\d") as told:
            widths_for(wide, 32, importance, share, 0.5)
        assert "\n" not in str(told.value)
    # Streams whose widths the network's code relies on can't go.
    with pytest.raises(UserError, match=r"can't leave 0.01 of the MACs: .* down to 0\.\d+"):
        prune(dense("resnet20"), 32, 0.01, loader())


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


WIDTHS = "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]"
ONE_EPOCH = ("train.epochs=1", "train.finetune_epochs=0", WIDTHS)
STILL = (*ONE_EPOCH, "train.lr=1e-12", "train.weight_decay=0")


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


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


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
