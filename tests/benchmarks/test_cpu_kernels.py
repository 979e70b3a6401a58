"""The measurement of CPU kernels leaves out what it says it does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import cpu_kernels
from cpu_kernels import VARIANTS, Network


def test_each_variant_runs_by_the_ways_that_it_is_left() -> None:
    values = cpu_kernels.measure(Network("tiny", "resnet20", 0.5, {}), rounds=1)
    assert list(values["median_ms"]) == list(VARIANTS)
    layers = values["layers"]
    assert all(set(layers[name]) <= set(ways) for name, ways in VARIANTS.items())
    assert {sum(counts.values()) for counts in layers.values()} == {layers["collect alone"].total()}
    assert layers["collect alone"].total() > 0
