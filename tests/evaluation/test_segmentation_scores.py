import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.config import EmbeddingConfig, HeadsConfig
from deepmoe.costs import active_share, count_macs
from deepmoe.evaluation.segmentation_scores import (
    SegmentationEvaluation,
    evaluate_segmentation,
    iou_from_confusion,
)
from deepmoe.registry import create_model

NAMES = ("sky", "road", "car", "tree", "sign")


def tiny_drn(gates: str | None = "inner"):
    return create_model(
        "drn_a_50",
        classes=len(NAMES),
        gates=gates,
        widths=[4] * 32,
        embedding=EmbeddingConfig(widths=(4, 4)),
        heads=HeadsConfig(init="normal(0, 1)"),
    )


def some_labels(*size: int) -> Tensor:
    """Random classes 0 to 3 with a tenth void; class 4 never occurs."""
    return torch.randint(4, size).masked_fill(torch.rand(size) < 0.1, 255)


def brute_force_iou(labels: Tensor, predictions: Tensor, label: int) -> float:
    """Sets of pixel positions, one class at a time."""
    counted = [i for i, y in enumerate(labels.flatten().tolist()) if y != 255]
    flat_labels, flat_predictions = labels.flatten().tolist(), predictions.flatten().tolist()
    true = {i for i in counted if flat_labels[i] == label}
    found = {i for i in counted if flat_predictions[i] == label}
    return len(true & found) / len(true | found) if true | found else math.nan


def test_iou_of_a_small_matrix() -> None:
    matrix = torch.tensor([[3, 1, 0, 0], [2, 4, 0, 0], [0, 0, 0, 0], [0, 5, 0, 0]])
    iou = iou_from_confusion(matrix)
    assert iou[:2].tolist() == [3 / 6, 4 / 12]
    assert iou[2].isnan()  # neither labelled nor predicted
    assert iou[3] == 0  # labelled, never found


def test_evaluation_equals_sets_of_pixels() -> None:
    model = tiny_drn()
    # Two sizes, and so two costs.
    batches = [
        (torch.randn(n, 3, *size), some_labels(n, *size))
        for n, size in ((2, (32, 48)), (1, (40, 24)))
    ]
    result = evaluate_segmentation(model, batches, NAMES)
    assert model.training
    model.eval()
    with torch.no_grad():
        outputs = [model(x) for x, _ in batches]
    labels = torch.cat([y.flatten() for _, y in batches])
    logits = torch.cat([o.logits.movedim(1, -1).flatten(0, 2) for o in outputs]).double()
    predictions = logits.argmax(dim=1)
    expected = [brute_force_iou(labels, predictions, label) for label in range(len(NAMES))]
    assert tuple(result.iou) == NAMES
    assert list(result.iou.values()) == pytest.approx(expected, nan_ok=True)
    real = [value for value in expected if not math.isnan(value)]
    assert result.mean_iou == result.accuracy == pytest.approx(sum(real) / len(real))
    counted = labels != 255
    right = (predictions == labels)[counted]
    assert result.pixel_accuracy == pytest.approx(right.double().mean().item())
    assert result.loss == pytest.approx(F.cross_entropy(logits[counted], labels[counted]).item())
    assert result.images == 3
    macs, dense, active = [], [], []
    for (x, _), output in zip(batches, outputs, strict=True):
        size = (x.shape[2], x.shape[3])
        macs += count_macs(model, size, output.gates).tolist()
        dense += [count_macs(model.gating, size)] * len(x)
        active += active_share(output.gates).tolist()
    assert result.macs == pytest.approx(sum(macs) / 3, rel=1e-12)
    assert result.dense_macs == pytest.approx(sum(dense) / 3, rel=1e-12)
    assert result.active == pytest.approx(sum(active) / 3)
    assert 0 < result.active < 1
    assert result.macs_share == result.macs / result.dense_macs


def test_absent_classes_are_left_out_and_void_pixels_do_not_count() -> None:
    labels = torch.full((1, 8, 8), 255)
    predictions = torch.full((1, 8, 8), 3)  # of class 3 at void pixels alone
    labels[:, :2], predictions[:, :2] = 0, 0
    labels[:, 2:4], predictions[:, 2:4] = 1, 0
    model = tiny_drn(gates=None)
    batches = [(torch.randn(1, 3, 8, 8), labels)]
    logits = F.one_hot(predictions, len(NAMES)).movedim(-1, 1).float()
    model.register_forward_hook(lambda _m, _x, output: output._replace(logits=logits))
    result = evaluate_segmentation(model, batches, NAMES)
    assert result.iou["sky"] == 0.5 and result.iou["road"] == 0
    assert all(math.isnan(result.iou[name]) for name in ("car", "tree", "sign"))
    assert result.mean_iou == 0.25
    assert result.pixel_accuracy == 0.5
    assert (result.macs_share, result.active, result.embedding_accuracy) == (1.0, 1.0, None)
    values = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert values["iou"] == {"sky": 0.5, "road": 0.0, "car": None, "tree": None, "sign": None}
    assert (values["mean_iou"], values["macs_share"]) == (0.25, 1.0)
    assert isinstance(result, SegmentationEvaluation)


def test_nothing_to_evaluate_and_wrong_names_are_errors() -> None:
    model = tiny_drn()
    with pytest.raises(ValueError, match="no images"):
        evaluate_segmentation(model, [], NAMES)
    with pytest.raises(ValueError, match="the model has 5 classes, not 2"):
        evaluate_segmentation(model, [], ("a", "b"))
