"""The README's matrix and its latencies are of what they say."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import headline_latency
import supported_networks

from deepmoe import create_model


def test_what_works_is_tried_and_what_does_not_is_named() -> None:
    model = create_model("resnet20", gates="all", classes=3, widths=[4] * 9)
    found = supported_networks.tried(model, torch.randn(2, 3, 16, 16))
    assert all(found[column] is True for column in supported_networks.TRIED)
    assert found["ungated"].pop("is the network's output") == 1
    assert found["gated_groups"] == 9 and len(found["ungated"]) >= 1  # its residual streams


def test_a_rule_that_is_broken_or_missing_is_no_yes() -> None:
    rule = supported_networks.Rule
    kept, broken = rule("MACs equal, 0.1", True, ""), rule("MACs equal, 0.5", False, "")
    assert supported_networks._passed((kept,), "MACs equal")
    assert not supported_networks._passed((kept, broken), "MACs equal")
    assert not supported_networks._passed((kept,), "the sparse engine")


def test_networks_of_a_share_cost_that_share() -> None:
    wide = headline_latency.narrowed(0.12)
    small = create_model("vgg16", classes=100, gates=None, wide=wide)
    dense = create_model("vgg16", classes=100, gates=None)
    macs = [headline_latency.count_macs(m.gating, headline_latency.SIZE) for m in (small, dense)]
    assert 0.115 < macs[0] / macs[1] <= 0.12
