from itertools import combinations

import numpy as np
import pytest

from deepmoe.errors import UserError
from deepmoe.evaluation import GateRecord
from deepmoe.evaluation.routes import count_routes

NAMES = ("cat", "dog", "emu", "fox")


@pytest.fixture
def record() -> GateRecord:
    """24 images of three of four classes, with seven routes at most."""
    rng = np.random.default_rng(0)
    routes = rng.random((7, 9)) < 0.5
    routes[:, 0], routes[:, 1], routes[:, 2] = True, False, routes[:, 3]
    taken = rng.integers(0, 7, 24)
    gates = routes[taken] * rng.uniform(0.1, 2, (24, 9))
    return GateRecord(
        labels=rng.integers(0, 3, 24),
        predictions=np.zeros(24, dtype=np.int64),
        macs=np.ones(24),
        gates=(gates[:, :4], gates[:, 4:]),
        layer_names=("first", "second"),
        class_names=NAMES,
        dense_macs=2,
    )


def brute_similarity(patterns: np.ndarray, labels: np.ndarray, same: bool) -> float:
    pairs = [
        (patterns[i] == patterns[j]).mean()
        for i, j in combinations(range(len(labels)), 2)
        if (labels[i] == labels[j]) == same
    ]
    return float(np.mean(pairs))


def test_routes_are_those_that_a_plain_count_finds(record) -> None:
    routes = count_routes(record)
    patterns = np.concatenate(record.gates, axis=1) > 0
    keys = [tuple(row) for row in patterns.tolist()]
    counts = sorted((keys.count(key) for key in set(keys)), reverse=True)
    assert list(routes.counts) == counts
    assert routes.distinct == len(set(keys)) and routes.alone == counts.count(1)
    took = list(zip(keys, record.labels.tolist(), strict=True))
    classes = {key: {label for other, label in took if other == key} for key in keys}
    assert routes.shared == sum(len(found) > 1 for found in classes.values())
    assert [c.name for c in routes.classes] == ["cat", "dog", "emu"]
    for label, of_class in enumerate(routes.classes):
        mine = [key for key, at in zip(keys, record.labels, strict=True) if at == label]
        assert of_class.images == len(mine) and of_class.distinct == len(set(mine))
        assert of_class.commonest == max(mine.count(key) for key in mine)
        assert of_class.active == pytest.approx(np.mean(mine))


def test_layers_are_described_and_compared(record) -> None:
    routes = count_routes(record)
    patterns = [gates > 0 for gates in record.gates]
    for found, pattern in zip(
        (*routes.layers, routes.joined), (*patterns, np.concatenate(patterns, axis=1)), strict=True
    ):
        assert found.channels == pattern.shape[1]
        assert found.always == sum(pattern[:, c].all() for c in range(pattern.shape[1]))
        assert found.never == sum(not pattern[:, c].any() for c in range(pattern.shape[1]))
        assert found.distinct == len({tuple(row) for row in pattern.tolist()})
        assert found.rank == np.linalg.matrix_rank(pattern.astype(float))
        for same, value in ((True, found.within), (False, found.between)):
            assert value == pytest.approx(brute_similarity(pattern, record.labels, same))
    assert routes.as_dict()["layers"][0]["name"] == "first"


def test_images_that_left_by_an_exit_take_no_route(record) -> None:
    left = np.arange(24) >= 2
    values = {**vars(record), "exited": left}
    routes = count_routes(GateRecord(**values))
    assert routes.images == 2 and sum(routes.counts) == 2
    with pytest.raises(UserError, match="answered all images"):
        count_routes(GateRecord(**{**values, "exited": np.ones(24, dtype=bool)}))
    with pytest.raises(UserError, match="without gates"):
        count_routes(GateRecord(**{**values, "gates": (), "layer_names": ()}))
