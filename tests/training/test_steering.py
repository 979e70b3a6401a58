"""Training under gates that are made of features: schedules, turns, budgets, resuming, verbs."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from helpers import tiny_config
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import deepmoe
from deepmoe.checkpoint import load_checkpoint
from deepmoe.cli import main
from deepmoe.config import HeadsConfig, RunConfig, TrainConfig, apply_overrides
from deepmoe.costs import count_macs, dense_macs
from deepmoe.data import BatchLoader
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.graph import channel_strengths
from deepmoe.registry import create_model
from deepmoe.training import FitResult, fit
from deepmoe.training.log import read_metrics
from deepmoe.training.schedules import stages
from deepmoe.training.steering import AgentSteering, ShareSchedule, falling, share_for

FBS = (
    *("heads.kind=fbs", "heads.lr_scale=0.3", "train.target_macs=0.6", "loss.sparsity=1e-8"),
    *("train.epochs=4", "train.finetune_epochs=1", "train.batch_size=128"),
)
RNP = (
    *("heads.kind=rnp", "heads.lr_scale=0.3", "train.target_macs=0.5", "train.epochs=3"),
    *("train.finetune_epochs=1", "train.keep_checkpoints=9"),
)
WIDE = "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]"


def run(out: Path, *settings: str, resume: bool = False) -> FitResult:
    return fit(tiny_config(*settings), out, quiet=True, resume=resume)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> FitResult:
    out = tmp_path_factory.mktemp("runs") / "dense"
    short = ("train.epochs=3", "train.finetune_epochs=0", "train.batch_size=128")
    return run(out, "model.gates=none", WIDE, *short)


@pytest.fixture(scope="module")
def boosted(tmp_path_factory) -> FitResult:
    out = tmp_path_factory.mktemp("runs") / "fbs"
    return run(out, *FBS)


@pytest.fixture(scope="module")
def pruned(dense, tmp_path_factory) -> FitResult:
    out = tmp_path_factory.mktemp("runs") / "rnp"
    return run(out, *RNP, WIDE, f"train.start={dense.checkpoint}")


def test_the_share_falls_step_by_step_to_its_end() -> None:
    model = create_model("resnet20", classes=10, heads=HeadsConfig(kind="fbs", share=0.25))
    schedule = ShareSchedule(model, 32, None, (0.2, 0.6))
    found = []
    for progress in (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0, 0.4):
        schedule.before(progress)
        found.append(model.heads.kept_L.tolist()[::4])  # of layers of 16, 32 and 64
    shares = [1.0, 1.0, 0.8125, 0.625, 0.4375, 0.25, 0.25, 0.625]  # a function of progress alone
    assert found == [[round(s * w) for w in (16, 32, 64)] for s in shares]
    assert falling(1.0, 0.1, 0.5, (0.0, 1.0)) == pytest.approx(0.55)
    assert falling(1.0, 0.1, 0.3, (0.3, 0.3)) == 0.1


@pytest.mark.parametrize("target", [0.3, 0.5, 0.99, 2e7])
def test_a_share_for_a_target_is_the_largest_that_costs_no_more(target) -> None:
    model = create_model("vgg11", classes=10, heads=HeadsConfig(kind="fbs"))
    share, heads = share_for(model, 32, target), model.heads
    allowed = target * dense_macs(model, 32) if target <= 1 else target

    def cost(kept: list[int]) -> int:
        gates = [(torch.arange(w) < k)[None] for w, k in zip(heads.widths, kept, strict=True)]
        return int(count_macs(model, 32, gates))

    kept = heads.counts(share)
    assert cost(kept) <= allowed
    more = share
    while heads.counts(more) == kept:
        more += 1e-4
    assert cost(heads.counts(more)) > allowed
    assert share_for(model, 32, 1e12) == 1.0


@pytest.mark.parametrize(("kind", "steering"), [("fbs", ShareSchedule), ("rnp", AgentSteering)])
def test_a_target_out_of_reach_is_refused(kind, steering) -> None:
    model = create_model("resnet20", classes=10, heads=HeadsConfig(kind=kind))
    with pytest.raises(UserError, match="costs at least"):
        steering(model, 32, 0.01, (0.1, 0.6))


def test_agent_and_network_take_turns() -> None:
    turns = stages(TrainConfig(epochs=3, finetune_epochs=2), by_turns=True)
    assert [(s.name, s.start, s.end, s.frozen) for s in turns] == [
        ("agent", 0, 1, False),
        ("network", 1, 2, True),
        ("agent", 2, 3, False),
        ("finetune", 3, 5, True),
    ]


def test_boosting_learns_and_costs_exactly_its_share(boosted) -> None:
    metrics = read_metrics(boosted.metrics)
    assert metrics[-1]["task_loss"] < 0.7 * metrics[0]["task_loss"]
    assert boosted.evaluation.accuracy > 0.3
    shares = [line["macs_share"] for line in metrics]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.9
    assert shares[-1] <= 0.6
    heads, network = boosted.model.heads, boosted.model.network
    kept = heads.counts(share_for(boosted.model, 8, 0.6))
    assert heads.kept_L.tolist() == kept
    assert boosted.evaluation.active == pytest.approx(sum(kept) / 36)
    fixed = [p for name, p in network.named_parameters() if name.endswith("bn1.weight")][1:]
    assert len(fixed) == 9 and all(p.eq(1).all() and not p.requires_grad for p in fixed)
    x = next(iter(boosted.data.evaluation))[0]
    with torch.no_grad():
        gates = torch.cat(boosted.model.eval()(x).gates, dim=1)
    assert gates.std(dim=0).max() > 0.1  # they differ from image to image


def test_an_agent_meets_its_target_and_images_differ(pruned) -> None:
    assert 0.45 <= pruned.evaluation.macs_share <= 0.52
    assert [m["stage"] for m in read_metrics(pruned.metrics)] == [
        *("agent", "network", "agent", "finetune")
    ]
    assert pruned.evaluation.accuracy > 0.2
    heads = pruned.model.heads
    assert heads.epsilon.item() == pytest.approx(0.1)
    x = torch.cat([x for x, _ in pruned.data.evaluation])
    with torch.no_grad():
        output = pruned.model.eval()(x)
    assert len(count_macs(pruned.model, 8, output.gates).unique()) > 1
    assert set(torch.cat(output.gates, dim=1).unique().tolist()) <= {0.0, 1.0}


def test_who_has_no_turn_is_fixed(pruned, dense) -> None:
    at = [load_file(path) for path in sorted(pruned.checkpoint.parent.glob("epoch-*.safetensors"))]
    before = {f"model.network.{n}": t for n, t in dense.model.network.state_dict().items()}
    steered = {f"model.heads.{n}" for n in ("shift", "penalty", "epsilon")}
    names = {
        part: {n for n in at[0] if n.startswith(f"model.{part}")} - steered
        for part in ("network", "heads")
    }

    def changed(one: dict, other: dict, part: str) -> bool:
        return any(not torch.equal(one[n], other[n]) for n in names[part])

    assert not changed(before, at[0], "network")  # norms' statistics neither
    for epoch in (1, 2, 3):
        agent = epoch == 2  # the network has the others, the last one to fine-tune
        assert changed(at[epoch - 1], at[epoch], "heads") == agent
        assert changed(at[epoch - 1], at[epoch], "network") != agent


def test_a_price_is_moved_while_the_agent_learns_and_decisions_shift_after_each_epoch(
    pruned,
) -> None:
    at = [load_file(path) for path in sorted(pruned.checkpoint.parent.glob("epoch-*.safetensors"))]
    penalties = [tensors["model.heads.penalty"].item() for tensors in at]
    assert penalties[0] == penalties[1] != penalties[2] == penalties[3]
    assert all(-0.1 * 16 <= p <= -0.1 / 16 for p in penalties)
    shifts = [tensors["model.heads.shift"].item() for tensors in at]
    assert all(shifts) and len(set(shifts)) > 1


def test_without_a_target_the_price_stays(tmp_path) -> None:
    settings = ("heads.kind=rnp", "heads.penalty=-0.3", "train.finetune_epochs=0")
    heads = run(tmp_path, *settings).model.heads
    assert heads.penalty.item() == pytest.approx(-0.3) and heads.shift == 0


def interrupt_at(monkeypatch, epoch: int, batch: int) -> None:
    """Asks the run to stop before this batch of this epoch."""
    original = BatchLoader.epoch

    def interrupted(self, which, start=0):
        for number, item in enumerate(original(self, which, start), start):
            if (which, number) == (epoch, batch):
                os.kill(os.getpid(), signal.SIGTERM)
            yield item

    monkeypatch.setattr(BatchLoader, "epoch", interrupted)


@pytest.mark.parametrize(("kind", "at"), [("fbs", (1, 3)), ("rnp", (2, 1))], ids=str)
def test_a_run_resumes_to_the_bit(kind, at, boosted, pruned, dense, tmp_path, monkeypatch) -> None:
    whole = {"fbs": boosted, "rnp": pruned}[kind]
    settings = {
        "fbs": FBS,
        "rnp": (*RNP, WIDE, f"train.start={dense.checkpoint}"),
    }[kind]
    with monkeypatch.context() as patch:
        interrupt_at(patch, *at)
        with pytest.raises(TrainingInterrupted):
            run(tmp_path, *settings)
    state = load_checkpoint(tmp_path / "last.safetensors").state
    assert (state.epoch, state.batch) == (at[0], at[1] + 1)
    resumed = run(tmp_path, *settings, resume=True)
    one, other = load_file(resumed.checkpoint), load_file(whole.checkpoint)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_boosting_starts_as_the_trained_network_and_an_agent_orders_its_channels(
    dense, pruned, tmp_path
) -> None:
    strengths = channel_strengths(dense.model.network, dense.model.gating)
    ranks = pruned.model.heads.ranks_C.split(pruned.model.heads.widths)
    for rank, strength in zip(ranks, strengths, strict=True):
        assert torch.equal(rank, strength.argsort(descending=True).argsort())
    started = (f"train.start={dense.checkpoint}", "train.lr=1e-9", "train.epochs=1")
    settings = ("heads.kind=fbs", "heads.share=1.0", WIDE, "train.finetune_epochs=0", *started)
    found = run(tmp_path / "fbs", *settings, "train.budget_ramp=[0, 0]").model.eval()
    for layer in found.heads.layers:
        torch.nn.init.zeros_(layer.weight)
    # In training, norms have moved their statistics, and nothing else has changed.
    found.network.load_state_dict(
        {
            **found.network.state_dict(),
            **{n: t for n, t in _flipped(dense, found).items() if "running" in n},
        }
    )
    x = next(iter(dense.data.evaluation))[0]
    with torch.no_grad():
        expected = dense.model.eval()(x).logits
        torch.testing.assert_close(found(x).logits, expected, atol=1e-3, rtol=1e-3)


def _flipped(dense: FitResult, found: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Statistics of the trained network, of filters that were turned round as well."""
    statistics = {n: t.clone() for n, t in dense.model.network.state_dict().items()}
    for name, scale in dense.model.network.named_parameters():
        if name.endswith("bn1.weight") and not found.network.get_parameter(name).requires_grad:
            mean = name.replace("weight", "running_mean")
            statistics[mean] = statistics[mean] * scale.detach().sign()
    return statistics


def test_what_is_left_of_a_pruned_start_is_boosted(dense, tmp_path) -> None:
    started = (f"train.start={dense.checkpoint}", "train.prune=0.6", "train.epochs=1")
    result = run(tmp_path, "heads.kind=fbs", WIDE, "train.finetune_epochs=0", *started)
    assert sum(result.model.gating.widths) < 72
    assert result.model.network.get_parameter("layer1.0.bn1.weight").eq(1).all()
    biases = torch.cat([layer.bias.detach() for layer in result.model.heads.layers])
    assert (biases - 1).abs().max() > 0.05  # the trained network's scales
    assert load_checkpoint(result.checkpoint).model.gating.widths == result.model.gating.widths


@pytest.mark.parametrize("kind", ["fbs", "rnp"])
def test_networks_and_datasets_of_ones_own_are_trained(kind, tmp_path) -> None:
    network = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()),
        *(torch.nn.Conv2d(8, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)),
        *(torch.nn.Flatten(), torch.nn.Linear(8, 2)),
    )
    labels = torch.arange(64) % 2
    images = torch.randn(64, 3, 12, 12) + labels[:, None, None, None]
    pairs = TensorDataset(images, labels)
    model = deepmoe.gate(network, images[:1], heads=HeadsConfig(kind=kind))
    wanted = ["train.epochs=4", "train.batch_size=16", "train.target_macs=0.8", "data.workers=0"]
    result = fit(model, pairs, pairs, apply_overrides(RunConfig(), wanted), tmp_path, quiet=True)
    assert result.evaluation.macs_share <= 0.8
    loaded = load_checkpoint(result.checkpoint, network=network).model
    assert torch.equal(loaded(images).logits, result.model.eval()(images).logits)


def verb(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize("kind", ["fbs", "rnp"])
def test_verbs_take_such_checkpoints_or_say_why_not(kind, boosted, pruned, tmp_path) -> None:
    result = {"fbs": boosted, "rnp": pruned}[kind]
    path, image, out = result.checkpoint, tmp_path / "grey.png", tmp_path / "out.safetensors"
    Image.new("L", (40, 30), 200).save(image)
    evaluated = verb("eval", path, "--json")
    assert evaluated.exit_code == 0, evaluated.output
    values = json.loads(evaluated.stdout)
    assert values["accuracy"] == result.evaluation.accuracy
    assert values["macs"] == result.evaluation.macs
    assert values["embedding_accuracy"] is None
    assert "accuracy" in verb("eval", path).output
    predicted = json.loads(verb("predict", path, image, "--json").stdout)[0]
    assert predicted["macs"] > 0 and predicted["label"] in "0123456789"
    if kind == "fbs":
        assert predicted["macs"] == values["macs"]  # every image costs the same
    for arguments in (
        ("eval", path, "--sparse"),
        ("predict", path, image, "--sparse"),
        ("curve", path),
        ("cut", path, "--macs", "0.3", "--out", out),
        ("bench", "sparse", path),
    ):
        refused = verb(*arguments)
        lines = refused.stderr.strip().splitlines()
        assert refused.exit_code == 2 and len(lines) == 1, (arguments, refused.output)
        assert "computed from features" in lines[0], arguments
    refused = verb("exits", path, "--macs", "0.3", "--out", out)
    assert refused.exit_code == 2 and len(refused.stderr.strip().splitlines()) == 1
    assert not out.exists()
