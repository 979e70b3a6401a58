import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from deepmoe.analysis import activity_by_class
from deepmoe.analysis.gate_plots import gate_heatmap
from deepmoe.analysis.names import file_size, in_plot, readable_layers
from deepmoe.analysis.plots import as_data_uri, loss_curves, macs_histogram
from deepmoe.config import EmbeddingConfig
from deepmoe.costs import count_costs, count_macs
from deepmoe.evaluation import GateRecord, collect_gates
from deepmoe.model import DeepMoE, confidence
from deepmoe.registry import create_model

BATCHES = [(torch.randn(n, 3, 16, 16), torch.randint(10, (n,))) for n in (5, 3)]


@pytest.fixture
def record() -> GateRecord:
    gates = (
        np.array([[0.0, 1.0], [2.0, 1.0], [0.0, 0.0]]),
        np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]]),
    )
    return GateRecord(
        labels=np.array([0, 0, 2]),
        predictions=np.array([0, 1, 2]),
        macs=np.array([10, 20, 30]),
        gates=gates,
        layer_names=("first", "second"),
        class_names=("cat", "dog", "emu"),
        dense_macs=40,
    )


def test_activity_is_averaged_over_the_images_of_a_class(record) -> None:
    table = activity_by_class(record)
    np.testing.assert_allclose(table, [[0.75, 0.75], [np.nan, np.nan], [0.0, 0.25]])


def test_the_heat_map_shows_the_table(record) -> None:
    axes = gate_heatmap(record).axes[0]
    np.testing.assert_allclose(axes.images[0].get_array().filled(np.nan)[0], [75, 75])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["first", "second"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["cat", "dog", "emu"]


def test_the_histogram_counts_every_image(record) -> None:
    axes = macs_histogram(record).axes[0]
    assert sum(patch.get_height() for patch in axes.patches) == 3
    same = dataclasses.replace(record, macs=np.array([10, 10, 10]))
    assert as_data_uri(macs_histogram(same)).startswith("data:image/svg+xml;base64,")


def test_curves_of_every_run() -> None:
    line = {"task_loss": 1.0, "evaluation_loss": 2.0, "accuracy": 0.5}
    joint = [{**line, "epoch": e, "stage": "joint"} for e in (1, 2)]
    frozen = [*joint, {**line, "epoch": 3, "stage": "finetune"}]
    loss, accuracy = loss_curves({"dense": joint, "deepmoe": frozen}).axes
    assert [len(x.get_xdata()) for x in loss.lines] == [2, 2, 3, 3]
    assert [t.get_text() for t in accuracy.get_legend().get_texts()] == ["dense", "deepmoe"]


def leaving(gates: str | None) -> DeepMoE:
    """A model whose embedding answers five of the images in BATCHES."""
    model = create_model(
        "resnet20",
        classes=10,
        widths=[4] * 9,
        gates=gates,
        exits=True,
        embedding=EmbeddingConfig(widths=(4, 8)),
    ).eval()
    nn.init.normal_(model.embedding.project.weight, std=5.0)
    with torch.no_grad():
        sure = torch.cat([confidence(model(x).embedding_logits) for x, _ in BATCHES])
    model.exit_at = sure.median()
    return model


def test_images_that_the_embedding_answers_run_no_channels() -> None:
    model = leaving("inner")
    record = collect_gates(model, BATCHES, tuple("abcdefghij"))
    assert record.exited.sum() == 5
    for gates in record.gates:
        np.testing.assert_array_equal((gates == 0).all(axis=1), record.exited)
    assert set(record.macs[record.exited]) == {count_costs(model, 16).embedding_macs}
    assert set(record.macs[~record.exited]) == {count_macs(model, 16)}


def test_layers_and_sizes_can_be_read() -> None:
    assert readable_layers(["features.0", "features.7"]) == ["conv 1", "conv 2"]
    assert readable_layers(["conv1", "layer2.0.conv1"]) == ["conv1", "stage 2, block 1, conv 1"]
    assert in_plot("$x^" + "y" * 40) == r"\$x^" + "y" * 22 + "..."
    sizes = [file_size(n) for n in (12, 1_234, 45_600_000, 2.5e12)]
    assert sizes == ["12 B", "1.23 KB", "45.6 MB", "2500.0 GB"]
