import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from deepmoe.config import EmbeddingConfig, HeadsConfig
from deepmoe.costs import active_share, count_macs
from deepmoe.errors import UserError
from deepmoe.evaluation import collect_gates, evaluate
from deepmoe.registry import create_model

BATCHES = [(torch.randn(n, 3, 16, 16), torch.randint(10, (n,))) for n in (5, 3)]


@pytest.fixture
def model():
    return create_model(
        "resnet20",
        classes=10,
        embedding=EmbeddingConfig(widths=(8, 8)),
        heads=HeadsConfig(init="normal(0, 1)"),
    )


def test_evaluation_equals_plain_means_over_images(model) -> None:
    result = evaluate(model, BATCHES)
    assert model.training
    model.eval()
    x, labels = torch.cat([b[0] for b in BATCHES]), torch.cat([b[1] for b in BATCHES])
    with torch.no_grad():
        output = model(x)
    loss = torch.nn.functional.cross_entropy(output.logits, labels)
    assert result.images == 8
    assert result.accuracy == pytest.approx(
        (output.logits.argmax(1) == labels).double().mean().item()
    )
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.macs == count_macs(model, 16, output.gates).double().mean().item()
    assert result.active == pytest.approx(active_share(output.gates).mean().item())
    right = output.embedding_logits.argmax(1) == labels
    assert result.embedding_accuracy == pytest.approx(right.double().mean().item())
    assert result.macs_share == result.macs / count_macs(model.gating, 16)


def test_evaluation_leaves_frozen_parts_as_they_were(model) -> None:
    model.train()
    model.embedding.eval()
    evaluate(model, BATCHES)
    assert model.network.training
    assert not model.embedding.training


def test_no_images_is_an_error(model) -> None:
    with pytest.raises(ValueError, match="no images"):
        evaluate(model, [])


IMAGES, LABELS = BATCHES[0]


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (TensorDataset(IMAGES, LABELS), "put a dataset into a torch DataLoader first"),
        ([(image, int(label)) for image, label in zip(*BATCHES[0], strict=True)], "DataLoader"),
        (3, "come from a DataLoader or a list, not from a int"),
        ([IMAGES], "pair of tensors"),
        ([(IMAGES, LABELS, LABELS)], "pair of tensors"),
        ([(IMAGES, LABELS[:2])], r"a label for each, not tensors of \(5, 3, 16, 16\) and \(2,\)"),
        ([(IMAGES, LABELS + 9)], "labels are from 0 to 9, as the network has 10 classes"),
        ([(IMAGES, LABELS - 9)], "labels are from 0 to 9"),
        ([(IMAGES, LABELS.float())], "labels are whole numbers, not of torch.float32"),
    ],
)
def test_what_are_no_batches_gets_one_sentence(model, batches, words: str) -> None:
    with pytest.raises(UserError, match=words):
        evaluate(model, batches)


def test_what_is_no_model_gets_one_sentence(model) -> None:
    with pytest.raises(UserError, match="a deepmoe model is needed, not a ResNet"):
        evaluate(model.network, BATCHES)


def test_the_record_holds_every_images_gates(model) -> None:
    record = collect_gates(model, BATCHES, tuple("abcdefghij"))
    model.eval()
    with torch.no_grad():
        output = model(BATCHES[1][0])
    assert record.labels.tolist() == [int(y) for _, labels in BATCHES for y in labels]
    for recorded, gate in zip(record.gates, output.gates, strict=True):
        np.testing.assert_allclose(recorded[5:], gate.numpy(), atol=1e-6)
    np.testing.assert_array_equal(record.macs[5:], count_macs(model, 16, output.gates).numpy())
    assert len(record.layer_names) == len(record.gates) == 9
    assert record.layer_names == model.gating.names
    assert record.layer_names[0] == "layer1.0.conv1"
    assert record.scores.tolist() == (record.labels == record.predictions).tolist()


def test_a_dense_network_has_a_record_without_gates() -> None:
    dense = create_model("resnet20", classes=10, gates=None)
    record = collect_gates(dense, BATCHES, tuple("abcdefghij"))
    assert record.gates == () and record.exited is None and len(record) == 8
    assert set(record.macs) == {record.dense_macs} == {count_macs(dense, 16)}


def test_an_evaluation_tells_of_itself(model) -> None:
    result = replace(evaluate(model, BATCHES), exited=0.25, evaluated_on="test")
    values = json.loads(json.dumps(result.as_dict()))
    assert values["evaluated_on"] == "test" and values["macs_share"] == result.macs_share
    rows = [line.split(maxsplit=1) for line in str(result).splitlines()]
    assert ["accuracy", f"{result.accuracy:.2%}"] in rows
    assert "8 (test)" in str(result) and "25.0%" in str(result)
    assert [bar.get_width() for bar in result.plot().axes[0].patches] == [
        result.dense_macs / 1e6,
        result.macs / 1e6,
    ]
    assert "evaluated_on" not in evaluate(model, BATCHES).as_dict()
    with pytest.raises(FrozenInstanceError):
        result.loss = 0.0
