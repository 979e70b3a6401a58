import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import randomise_statistics
from torch import Tensor, nn

from deepmoe import gate
from deepmoe.budget import MacsBudget
from deepmoe.checking import check
from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.config import HeadsConfig, LossConfig, RunConfig, config_from_dict, config_to_dict
from deepmoe.configured_models import config_of
from deepmoe.costs import count_costs, count_macs, dense_macs
from deepmoe.data import DataInfo
from deepmoe.deploy import CodedNetwork, static_network
from deepmoe.errors import UserError
from deepmoe.evaluation import collect_gates, cost_curve, cut_to, set_exits
from deepmoe.layers import Decisions
from deepmoe.layers.agent import agent_loss
from deepmoe.losses import DeepMoELoss
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.registry import create_model
from deepmoe.sparse import sparsify
from deepmoe.training.codebook_learning import learn_codebook
from deepmoe.widening import widen

INFO = DataInfo(tuple("abcdefghij"), (32, 32), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


class Small(nn.Module):
    """Two gated convolutions and a classifier's layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.conv3 = nn.Conv2d(6, 4, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(F.relu(self.conv3(x)).mean(dim=(2, 3)))


class Joined(nn.Module):
    """Concatenation, a residual stream that several layers make, a depthwise layer, no norms."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
        self.stem = nn.Conv2d(11, 9, 3, padding=1)
        self.inner, self.back = nn.Conv2d(9, 7, 3, padding=1), nn.Conv2d(7, 9, 3, padding=1)
        self.spread, self.depth = nn.Conv2d(9, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.last, self.fc = nn.Conv2d(8, 6, 1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(torch.cat([F.relu(self.one(x)), F.relu(self.two(x))], dim=1))
        x = x + self.back(F.silu(self.inner(x)))
        x = F.relu(self.last(F.relu6(self.depth(F.relu6(self.spread(x))))))
        return self.fc(x.mean(dim=(2, 3)))


def heads(kind: str, **options: float) -> HeadsConfig:
    return HeadsConfig(kind=kind, **options)


def small(kind: str, **options: float) -> DeepMoE:
    network = randomise_statistics(Small()).eval()
    model = gate(network, torch.randn(1, 3, 16, 16), heads=heads(kind, **options))
    for parameter in model.heads.parameters():
        nn.init.normal_(parameter)  # so that images differ
    return model


def hand_written(network: Small, model: DeepMoE, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Feature boosting and suppression, as its paper has it: gates before the ReLU."""

    def boosted(x: Tensor, number: int, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
        layer = model.heads.layers[number]
        g = F.relu(F.linear(x.abs().mean(dim=(2, 3)), layer.weight, layer.bias))
        lowest = g.topk(max(1, g.shape[1] // 2), dim=1).values[:, -1:]
        gates.append(g * (g >= lowest))
        z = conv(x)
        statistics = (norm.running_mean, norm.running_var)
        normed = F.batch_norm(z, *statistics, eps=norm.eps) + norm.bias[:, None, None]
        return F.relu(gates[-1][:, :, None, None] * normed)

    gates: list[Tensor] = []
    x = boosted(x, 0, network.conv1, network.bn1)
    x = F.max_pool2d(boosted(x, 1, network.conv2, network.bn2), 2)
    return network.fc(F.relu(network.conv3(x)).mean(dim=(2, 3))), gates


def test_boosting_is_what_its_paper_says() -> None:
    model = small("fbs", share=0.5)
    assert model.gating.names == ("conv1", "conv2")
    assert model.embedding is None
    with torch.no_grad():
        for layer in model.heads.layers:
            layer.bias.add_(2.0)  # enough are open
    x = torch.randn(9, 3, 16, 16)
    logits, gates = hand_written(model.network, model, x)
    output = model(x)
    assert all((g > 0).sum(dim=1).eq(k).all() for g, k in zip(gates, (4, 3), strict=True))
    for found, expected in zip(output.gates, gates, strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(output.logits, logits, atol=1e-5, rtol=1e-4)
    assert output.embedding_logits is None and output.decisions is None


def test_gates_take_the_place_of_norms_scales_and_the_network_stays_the_same() -> None:
    network = randomise_statistics(Small()).eval()
    with torch.no_grad():
        network.bn1.weight[::3] *= -1  # filters turn round
    x, original = torch.randn(4, 3, 16, 16), copy.deepcopy(network)
    model = gate(network, x, heads=heads("fbs", share=1.0))
    for layer in model.heads.layers:
        nn.init.zeros_(layer.weight)
    torch.testing.assert_close(model(x).logits, original(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.heads.layers[0].bias, original.bn1.weight.abs())
    fixed = [name for name, p in network.named_parameters() if not p.requires_grad]
    assert fixed == ["bn1.weight", "bn2.weight"]
    assert network.bn1.weight.eq(1).all() and network.bn2.weight.eq(1).all()


def test_scales_stay_where_gates_can_not_replace_them() -> None:
    residual = create_model("resnet20", classes=10, heads=heads("fbs"))
    fixed = [name for name, p in residual.network.named_parameters() if not p.requires_grad]
    assert len(fixed) == 9 and all(name.endswith("bn1.weight") for name in fixed)
    smooth = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    model = gate(smooth, torch.randn(1, 3, 16, 16), heads=heads("fbs"))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("name", ["vgg11", "resnet20", "joined"])
def test_exactly_the_share_of_channels_runs(name, share) -> None:
    if name == "joined":
        images, where = torch.randn(5, 3, 16, 16), "all"
        model = gate(Joined(), images, where=where, heads=heads("fbs", share=share))
        assert any(len(model.gating.graph.groups[n].makers) > 1 for n in model.gating.gated)
    else:
        images = torch.randn(5, 3, 32, 32)
        options = {"widths": [16] * 8} if name == "vgg11" else {}
        model = create_model(name, classes=10, heads=heads("fbs", share=share), **options)
    for parameter in model.heads.parameters():
        nn.init.normal_(parameter)  # many are below zero
    expected = [max(1, round(share * width)) for width in model.gating.widths]
    model.eval()
    for half in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half), torch.no_grad():
            gates = model(images).gates
        for g_BC, kept in zip(gates, expected, strict=True):
            assert (g_BC != 0).sum(dim=1).eq(kept).all()
    macs = count_macs(model, (images.shape[2], images.shape[3]), gates)
    assert (macs == macs[0]).all()


@pytest.mark.parametrize("kind", ["fbs", "rnp"])
def test_costs_are_those_counted_by_hand(kind) -> None:
    model = small(kind).eval()
    network = 9 * 3 * 8 * 256 + 9 * 8 * 6 * 64 + 6 * 4 * 16 + 4 * 5
    own = {"fbs": 3 * 8 + 8 * 6, "rnp": (3 + 8 + 4 + 4) * 32 + 2 * 6 * 32 * 32}[kind]
    costs = count_costs(model, 16)
    assert (costs.macs, costs.gate_macs, costs.embedding_macs) == (network, own, 0)
    assert dense_macs(model, 16) == network and count_macs(model, 16) == network + own
    gates = model(torch.randn(6, 3, 16, 16)).gates
    for image, found in enumerate(count_macs(model, 16, gates).tolist()):
        one, two = (int((g[image] != 0).sum()) for g in gates)
        by_hand = 9 * 3 * one * 256 + 9 * one * two * 64 + two * 4 * 16 + 4 * 5
        assert found == by_hand + own


@pytest.mark.parametrize("kind", ["fbs", "rnp"])
def test_a_group_is_gated_for_all_its_readers_alike(kind) -> None:
    model = gate(Joined(), torch.randn(1, 3, 16, 16), where="all", heads=heads(kind)).eval()
    for parameter in model.heads.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(6, 3, 16, 16)
    output = model(x)
    logits = model.gating(model.network, x, output.gates)  # as if they had been known before
    torch.testing.assert_close(output.logits, logits)
    for image in range(2):
        alone = static_network(model, torch.cat(output.gates, dim=1)[image])
        torch.testing.assert_close(alone(x[image : image + 1])[0], logits[image])


@pytest.mark.parametrize("kind", ["fbs", "rnp"])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_checkpoints_give_the_same_model_back(kind, precision, tmp_path) -> None:
    kept = (
        {"share": 0.3, "spread": 0.5}
        if kind == "fbs"
        else {"groups": 3, "hidden": 8, "penalty": -0.2}
    )
    name = {"name": "resnet20", "widths": [4] * 9}
    model = create_model(**name, classes=10, heads=heads(kind, **kept))
    randomise_statistics(model.network)
    for parameter in model.heads.parameters():
        nn.init.normal_(parameter)
    if kind == "rnp":
        model.heads.order_by_strength([torch.rand(4) for _ in range(9)])
        model.heads.penalty.fill_(-0.7)
        model.heads.shift.fill_(0.03)
    else:
        model.heads.keep(0.6)
    model = model.double() if precision == "64-true" else model
    config = config_of(model)
    assert config.heads == heads(kind, **kept)
    assert config_from_dict(config_to_dict(config)) == config
    save_checkpoint(tmp_path / "one.safetensors", model, config, INFO, TrainState())
    loaded = load_checkpoint(tmp_path / "one.safetensors").model
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    x = model.as_input(torch.randn(3, 3, 32, 32))
    assert torch.equal(loaded(x).logits, model.eval()(x).logits)
    assert [p.requires_grad for p in loaded.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    model.save_pretrained(tmp_path / "folder")
    assert torch.equal(DeepMoE.from_pretrained(tmp_path / "folder").eval()(x).logits, loaded(x)[0])


@pytest.mark.parametrize("kind", ["fbs", "rnp"])
def test_models_export_and_compile(kind) -> None:
    model = small(kind).eval()
    x = torch.randn(3, 3, 16, 16)
    expected = model(x)
    exported = torch.export.export(model, (x,)).module()(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    for found in (exported, compiled):
        torch.testing.assert_close(found.logits, expected.logits)
        for one, other in zip(found.gates, expected.gates, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["fbs", "rnp"])
def test_what_needs_gates_ahead_is_refused_in_one_sentence(kind) -> None:
    model = small(kind).eval()
    x = torch.randn(4, 3, 16, 16)
    batches = [(x, torch.zeros(4, dtype=torch.int64))]
    ahead = {
        "route": lambda: model.route(x),
        "sparsify": lambda: sparsify(model),
        "cut": lambda: cut_to(model, 16, 0.5, batches, None),
        "curve": lambda: cost_curve(model, batches),
        "exits curve": lambda: cost_curve(model, batches, by="exits"),
        "codebook": lambda: learn_codebook(model, batches, 2, (16, 16)),
        "coded": lambda: CodedNetwork(model),
        "exits": lambda: set_exits(model, batches, macs=0.5),
        "check": lambda: check(model, x),
    }
    for what, call in ahead.items():
        with pytest.raises(UserError, match="computed from features"):
            call()
            pytest.fail(what)
    with pytest.raises(UserError, match="relu heads"):
        MacsBudget(model, 16, 0.5, steps=10)
    with pytest.raises(UserError, match="relu"):
        widen(model, 2)
    record = collect_gates(model, batches, tuple("abcde"))
    assert [g.shape for g in record.gates] == [(4, 8), (4, 6)]


def test_an_agent_is_rewarded_by_each_images_own_loss() -> None:
    values, actions = torch.randn(3, 2, 4), torch.randint(4, (3, 2))
    decisions = Decisions(values, actions, torch.tensor(-0.1))
    logits, labels = torch.randn(3, 5, 4, 4), torch.randint(5, (3, 4, 4))
    labels[0, :3] = 255
    labels[2] = 255  # nothing to be judged by
    own = [F.cross_entropy(logits[:1], labels[:1], ignore_index=255)]
    own += [F.cross_entropy(logits[1:2], labels[1:2]), torch.tensor(0.0)]
    output = DeepMoEOutput(logits, None, None, decisions=decisions)
    config = LossConfig(agent=2.0, sparsity=1.0)
    parts = DeepMoELoss.from_config(config, ignore_index=255)(output, labels)
    torch.testing.assert_close(parts.total, agent_loss(decisions, -2.0 * torch.stack(own)))
    assert parts.agent == parts.total != parts.task
    frozen = DeepMoELoss.from_config(config, frozen=True, ignore_index=255)(output, labels)
    assert frozen.total == frozen.task and frozen.agent == 0
    whole = DeepMoEOutput(logits[:, :, 0, 0], None, None, decisions=decisions)
    each = F.cross_entropy(whole.logits, labels[1, :3, 0], reduction="none")
    found = DeepMoELoss.from_config(LossConfig())(whole, labels[1, :3, 0]).agent
    torch.testing.assert_close(found, agent_loss(decisions, -each))


@pytest.mark.parametrize(
    ("table", "change", "words"),
    [
        ("train", {"codes": 4, "finetune_epochs": 2}, "train.codes"),
        ("model", {"exits": True}, "model.exits"),
        ("embedding", {"form": "network", "kept": (4,)}, "embedding.form"),
        ("heads", {"kind": "fbs", "share": 0.0}, "heads.share"),
        ("heads", {"kind": "rnp", "penalty": 0.0}, "heads.penalty"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(table, change, words) -> None:
    config = RunConfig(heads=heads("fbs"))
    with pytest.raises(UserError, match=words):
        dataclasses.replace(
            config, **{table: dataclasses.replace(getattr(config, table), **change)}
        )
