import dataclasses

import numpy as np
import pytest

from deepmoe.analysis import activity_by_class
from deepmoe.analysis.plots import as_data_uri, gate_heatmap, loss_curves, macs_histogram
from deepmoe.evaluation import GateRecord


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
