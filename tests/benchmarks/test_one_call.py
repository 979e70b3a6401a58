"""The measurements of single images on a CPU compare what they say they compare."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import headline_latency
import one_call


def test_as_many_images_exit_as_asked_for() -> None:
    torch.manual_seed(0)
    model = headline_latency.cascade(0.03, 0.06)
    values = headline_latency.measure({"exits": model}, rounds=1)["exits"]
    images = torch.randn(one_call.IMAGES, 1, 3, *one_call.SIZE)
    headline_latency.let_exit(model, images, 5)
    with torch.inference_mode():
        assert sum(bool(model(x).exited) for x in images) == 5
    first, second = (
        headline_latency.count_macs(headline_latency.dense(s), 32) for s in (0.03, 0.06)
    )
    expected = first + (1 - values["exited"]) * second
    assert values["macs"] == pytest.approx(expected, rel=0.01)
    assert values["ms"] > 0


def test_either_way_is_the_one_that_is_timed() -> None:
    model, x = headline_latency.dense(0.03), torch.randn(1, 3, *one_call.SIZE)
    threads = torch.get_num_threads()
    sparse = {way: one_call.planned(model, way, way, threads) for way in one_call.WAYS}
    for call in sparse.values():
        call(x)
    assert {way: len(call.static.chained) for way, call in sparse.items()} == {
        "library": 0,
        "chained": 1,
    }
