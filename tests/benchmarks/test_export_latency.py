"""Exported files are timed for networks of the cost that is named."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import export_latency

from deepmoe.costs import count_costs, dense_macs


def test_every_format_has_a_row(monkeypatch) -> None:
    monkeypatch.setitem(export_latency.NETWORKS, "resnet20", (16, 10))
    monkeypatch.setattr("deepmoe.export.exporting.LEAST_TIMED", 1)
    monkeypatch.setattr("deepmoe.export.exporting.CHECKED_IMAGES", 1)
    rows = export_latency.measured(["resnet20"], [0.5])
    assert [row["format"] for row in rows] == ["onnx", "torch-export"]
    assert all(0.45 < row["macs_share"] <= 0.5 for row in rows)
    assert all(row["parameters"] < row["dense_parameters"] for row in rows)
    assert all(row["ms"] > 0 and row["max_error"] < 1e-3 for row in rows)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_pruned_network_costs_its_share(share: float) -> None:
    loaded = export_latency.pruned("vgg16", 32, 10, share)
    found = count_costs(loaded.model, 32).macs / dense_macs(loaded.model, 32)
    assert 0.95 * share < found <= share
