"""Benchmarks say what they found: in a sentence, in a table, and as plain values."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from deepmoe import Benchmark
from deepmoe.bench.benchmark import compared, milliseconds
from deepmoe.bench.exits import ExitsBenchmark
from deepmoe.bench.sparse import SparseBenchmark
from deepmoe.bench.train import TrainBenchmark
from deepmoe.cli import main
from deepmoe.sparse import Plan

SPARSE = {
    "dense_wide_ms": 24.6,
    "dense_base_ms": 11.9,
    "presliced_ms": 11.1,
    "masked_ms": 30.0,
    "dynamic_ms": 12.5,
    "codebook_ms": None,
    "spread_ms": {"dynamic": [12.1, 13.0]},
    "ways": {"dynamic": "dynamic"},
    "max_error": 1e-6,
    "rerouted": 0,
    "routes": 2,
    "batch": 1,
    "density": 0.5,
    "exited": None,
    "widened": False,
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
}
TRAIN = {
    **{"model": "vgg16", "data": "digits", "batches_per_epoch": 2},
    **{"batch_size": 64, "device": "cpu", "precision": "32-true", "gpu_gib": {}},
    "seconds_per_epoch": {"dense": 10.0, "joint": 12.0, "frozen": 11.0},
}


def test_the_sparse_engine_is_told_in_one_sentence() -> None:
    found = SparseBenchmark(SPARSE, Plan())
    sentence = "dense 24.6 ms, sparse 12.5 ms: 2.0 times as fast; limit 11.1 ms"
    assert str(found).splitlines()[0] == found.sentence == sentence
    assert [t.name for t in found.timed()] == ["dense", "sparse", "limit"]
    assert "masked" not in str(found) and "not widened" not in str(found)
    assert "masked_ms: 30" in found.details() and "spread_ms.dynamic: 12.1, 13" in found.details()
    for timed in found.timed():
        assert f"{timed.name}: {timed.meaning}" in str(found)  # the legend
    packed = {"dense_wide_packed_ms": 14.0, "presliced_packed_ms": 9.5}
    all_run = SparseBenchmark({**SPARSE, **packed, "ways": {"dynamic": "dense"}}, Plan())
    assert all_run.sentence.endswith(
        "; limit 9.5 ms; no channel is skipped: running them all is faster here"
    )
    assert [t.time for t in all_run.timed()] == [24.6, 14.0, 12.5, 9.5]  # the engine's own share
    wide = SparseBenchmark({**SPARSE, "widened": True, "codebook_ms": 11.2}, Plan())
    assert "sparse by codes 11.2 ms: 2.2 times as fast" in wide.sentence
    assert "dense, not widened: " in str(wide)
    ungated = {key: value for key, value in SPARSE.items() if key != "presliced_ms"}
    assert SparseBenchmark(ungated, Plan()).sentence.endswith("2.0 times as fast")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            ExitsBenchmark(
                {
                    **{"batch": 1, "images": 360, "exited": 0.4, "evaluated_on": "test"},
                    **{"ms": 2.0, "ms_without": 3.0, "accuracy": 0.98, "accuracy_without": 0.99},
                    **{"images_per_second": 500.0, "images_per_second_without": 333.0},
                    **{"device": "cpu", "dtype": "float32"},
                }
            ),
            "without exits 3.00 ms, with exits 2.00 ms: 1.5 times as fast; "
            "accuracy 99.00% and 98.00%",
        ),
        (
            TrainBenchmark(TRAIN),
            "an epoch takes 10.0 s dense, 12.0 s gated (1.20 times as long) and 11.0 s with frozen "
            "gates",
        ),
        (SparseBenchmark(SPARSE, Plan()), None),
    ],
    ids=["exits", "train", "sparse"],
)
def test_benchmarks_are_results(found: Benchmark, sentence: str | None) -> None:
    assert sentence in (None, found.sentence)
    assert str(found).splitlines()[0] == found.sentence
    assert json.loads(json.dumps(found.as_dict())) == found.values
    (axes,) = found.plot().axes
    assert [bar.get_width() for bar in axes.patches] == [t.time for t in found.timed()]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.values = {}


def test_training_on_a_gpu_tells_its_memory() -> None:
    gib = {"dense": 3.84, "joint": 4.11, "frozen": 4.0}
    on_gpu = TrainBenchmark({**TRAIN, "device": "cuda", "gpu_gib": gib})
    assert on_gpu.setting().endswith("; GPU memory, GiB: dense 3.8, joint 4.1, frozen 4.0")
    assert "memory" not in TrainBenchmark(TRAIN).setting()


def test_times_are_compared_in_words() -> None:
    assert compared(1.02, 1.0) == compared(0.97, 1.0) == "about as fast"
    assert (compared(2.0, 1.0), compared(0.5, 1.0)) == ("2.0 times as slow", "2.0 times as fast")
    assert (milliseconds(24.61), milliseconds(0.0451)) == ("24.6", "0.045")


def test_internals_are_behind_an_option() -> None:
    quick = ("vgg11", "--wide", "0.1", "--rounds", "1", "--device", "cpu", "--no-compile")
    plain, detailed = (
        CliRunner().invoke(main, ["bench", "sparse", *quick, *more]).stdout
        for more in ((), ("--details",))
    )
    assert plain.startswith("dense ") and "; limit " in plain.splitlines()[0]
    assert "ways.dynamic" not in plain and "ways.dynamic: " in detailed
    assert "peak_memory_mb: " in detailed
