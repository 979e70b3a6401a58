"""`deepmoe describe`: what a network consists of, as text and as JSON."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import deepmoe
from deepmoe import checking
from deepmoe.cli import main
from deepmoe.costs import count_costs
from deepmoe.description import description, gated_share
from deepmoe.registry import create_model

NETWORKS = '''
import torch
from torch import nn


class Mixed(nn.Module):
    """A residual block, and one layer behind an operation that mixes channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.one, self.two = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 16, 3, padding=1)
        self.odd, self.last = nn.Conv2d(16, 12, 1), nn.Conv2d(12, 10, 1)
        self.classifier = nn.Linear(10, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = x + self.two(torch.relu(self.one(x)))
        x = self.last(self.odd(x).cumsum(dim=1))
        return self.classifier(x.mean(dim=(2, 3)))


class Plain(nn.Sequential):
    """One convolution: whatever it makes is read by the classifier."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        )


class TwoOutputs(Plain):
    def forward(self, x):
        return super().forward(x), x


class Branching(Plain):
    def forward(self, x):
        return super().forward(x if x.mean() > 0 else -x)
'''


@pytest.fixture(autouse=True)
def _networks(tmp_path, monkeypatch) -> None:
    (tmp_path / "described.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("described", None)


def describe(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["describe", *map(str, arguments)])


def described(*arguments: object) -> dict:
    result = describe(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def rows(text: str) -> dict[str, str]:
    """Lines of the tables by their first word."""
    return {line.split()[0]: line for line in text.splitlines() if line.strip()}


MIXED = ("described:Mixed", "--input", "16")


def test_groups_gates_and_reasons_are_printed() -> None:
    result = describe(*MIXED)
    assert result.exit_code == 0, result.output
    found = rows(result.stdout)
    assert "for an image of 16x16 px, 5 classes" in found["described:Mixed:"]
    assert "24 gates in 1 group" in found["24"]
    assert "gated" in found["one"] and "two" in found["one"]
    assert "reaches a residual stream" in found["stem"]
    assert "reaches cumsum" in found["odd"]
    assert "is read by the classifier" in found["last"]
    assert "is the network's output" in found["classifier"]
    assert "two" not in found  # layers are not listed


def test_all_gates() -> None:
    groups = {g["name"]: g for g in described(*MIXED, "--gates", "all")["groups"]}
    assert [name for name, g in groups.items() if g["gated"]] == ["stem", "one"]
    assert groups["stem"]["made_by"] == ["stem", "two"]
    assert groups["stem"]["read_by"] == ["one", "odd"]
    named = described(*MIXED, "--gates", "stem,last")
    assert [g["name"] for g in named["groups"] if g["gated"]] == ["stem", "last"]
    reasons = {g["name"]: g["why_not"] for g in named["groups"]}
    assert reasons["stem"] is None
    assert reasons["one"] == "was not asked for"


def test_layers_are_listed() -> None:
    found = rows(describe(*MIXED, "--layers").stdout)
    assert "conv 3x3" in found["two"]
    listed = described(*MIXED)["layers"]
    assert [layer["name"] for layer in listed][-1] == "classifier"
    assert listed[0] == {
        "name": "stem",
        "kind": "conv 3x3",
        "inputs": 3,
        "outputs": 16,
        "macs": 27 * 16 * 16 * 16,
    }


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [("resnet20", {}, 32), ("resnet18", {"gates": "all"}, 64), ("vgg16", {"wide": 0.5}, 32)],
)
def test_costs_are_those_that_are_counted_elsewhere(name: str, options: dict, size: int) -> None:
    arguments = [a for key, value in options.items() for a in (f"--{key}", value)]
    values = described(name, *arguments, "--input", size)
    model = create_model(name, **options)
    costs = count_costs(model, size)
    for key in ("params", "macs", "embedding_macs", "gate_macs"):
        assert values[key] == getattr(costs, key)
    assert values["macs"] == sum(layer["macs"] for layer in values["layers"])
    assert values["gates"] == sum(g["gates"] for g in values["groups"] if g["gated"])
    assert values["gates"] == sum(model.gating.widths)
    assert values["gated_share"] == gated_share(model.gating, size)
    assert all((g["why_not"] is None) == g["gated"] for g in values["groups"])


def test_python_and_the_command_line_tell_the_same() -> None:
    values = described("resnet20", "--classes", 7)
    del values["model"]
    assert values == description(create_model("resnet20", classes=7), 32)


def test_the_share_under_gates_counts_what_gates_touch() -> None:
    values = described(*MIXED, "--gates", "one")
    touched = sum(x["macs"] for x in values["layers"] if x["name"] in ("one", "two"))
    assert values["gated_share"] == pytest.approx(touched / values["macs"])


def test_a_network_without_anything_to_gate_is_described() -> None:
    result = describe("described:Plain", "--input", 16)
    assert result.exit_code == 0, result.output
    assert "nothing in it can be gated" in result.stdout
    assert "is read by the classifier" in rows(result.stdout)["0"]
    values = described("described:Plain", "--input", 16, "--check")
    assert values["gates"] == values["gated_share"] == 0
    assert values["macs"] == 8 * 27 * 14 * 14 + 8 * 5


def test_rules_are_tried_out() -> None:
    values = described(*MIXED, "--check")
    assert values["check"]["passed"]
    result = describe(*MIXED, "--check")
    assert result.exit_code == 0
    assert result.stdout.count("ok   ") == len(values["check"]["rules"]) == 6
    assert "FAIL" not in result.stdout


def test_a_rule_that_is_broken_ends_with_an_error(monkeypatch) -> None:
    monkeypatch.setattr(checking, "count_macs", lambda *_: torch.tensor([17]))
    result = describe(*MIXED, "--check")
    assert result.exit_code == 2
    assert "FAIL MACs equal PyTorch's count" in result.stdout
    assert (
        result.stderr.strip() == "Error: described:Mixed fails a check of its gates, see FAIL above"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resnet200"], ["no model is named 'resnet200'", "package.module:factory"]),
        (["described:Missing"], ["'Missing'"]),
        (["described:TwoOutputs"], ["gives 2 tensors", "returns its logits alone"]),
        (["described:Branching"], ["can't be captured"]),
        ([*MIXED, "--gates", "nonsense"], ["'nonsense'", "stem"]),
        ([*MIXED, "--gates", "odd"], ["odd", "can't be gated", "cumsum"]),
        ([*MIXED, "--gates", ""], ["group"]),
        ([*MIXED, "--classes", "0"], ["classes"]),
        (["resnet20", "--input", "0"], ["--input"]),
        (["vgg16", "--input", "8"], ["at least 32 px"]),
        (["described:Mixed", "--wide", "2"], ["takes no options of the zoo"]),
        ([], ["MODEL"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_with_one_line(arguments: list[str], words: list[str], capfd) -> None:
    result = describe(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    said = (result.stderr + capfd.readouterr().err).strip().splitlines()
    assert len(said) == 1, said
    for word in words:
        assert word in said[0]


def test_describing_writes_nothing_and_is_the_same_each_time(tmp_path) -> None:
    before = sorted(p.name for p in Path().iterdir() if p.name != "__pycache__")
    assert described(*MIXED, "--check")["groups"] == described(*MIXED)["groups"]
    assert sorted(p.name for p in Path().iterdir() if p.name != "__pycache__") == before


def test_what_gate_makes_can_be_described(capsys) -> None:
    network = create_model("resnet20", classes=5).network
    model = deepmoe.gate(network, torch.randn(2, 3, 32, 32))
    assert description(model, (32, 24))["input"] == [32, 24]
    assert capsys.readouterr() == ("", "")
