"""The measurement of other packages' networks compares the same images and counts what runs."""

import sys
from pathlib import Path

import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import other_networks


def test_a_network_is_measured_beside_itself() -> None:
    layers = [nn.Conv2d(3, 64, 3, 4), nn.ReLU(), nn.Conv2d(64, 64, 3, 2), nn.ReLU()]
    network = nn.Sequential(
        *layers, nn.Conv2d(64, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    values = other_networks.measure(network, rounds=1)
    ways = ["dense", "dense_channels_last", "engine_dense", "sparse"]
    assert list(values["median_ms"]) == ways
    assert 0.2 < values["macs_share"] < 1
    dense = min(values["median_ms"]["dense"], values["median_ms"]["dense_channels_last"])
    assert values["times_as_fast"] == pytest.approx(dense / values["median_ms"]["sparse"])
    all_channels = values["median_ms"]["engine_dense"]
    assert values["by_skipping"] == pytest.approx(all_channels / values["median_ms"]["sparse"])
