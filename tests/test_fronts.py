"""The scripts that join trained networks to models with exits."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from exit_front import SEEDS, Front, collected  # noqa: E402
from helpers import TINY_RUN  # noqa: E402
from whole_front import figures_of  # noqa: E402

from deepmoe.config import apply_overrides, load_config  # noqa: E402
from deepmoe.training import fit  # noqa: E402

CLASSES, IMAGES = 4, {"holdout": 400, "test": 400}
DENSE = 1000


def answers(right: float, macs: int, embedding: float, seed: int) -> dict[str, np.ndarray]:
    """Of a network that is right for so many images, the easiest ones, and sure of those."""
    found: dict[str, np.ndarray] = {"costs": np.array([macs, DENSE, 20])}
    for name, count in IMAGES.items():
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, CLASSES, count)
        difficulty = np.linspace(0, 1, count)
        for by, share in (("network", right), ("embedding", embedding)):
            said = np.where(difficulty < share, labels, (labels + 1) % CLASSES)
            sure = (6 * (1.2 - difficulty))[:, None]
            found[f"{name}/{by}"] = (np.eye(CLASSES)[said] * sure).astype(np.float16)
        found[f"{name}/y"] = labels
    return found


def made_up(networks: dict[str, tuple[float, int, float]]) -> Front:
    return Front(
        {
            f"{group}-seed{seed}/{key}": value
            for group, (right, macs, embedding) in networks.items()
            for seed in SEEDS
            for key, value in answers(right, macs, embedding, seed).items()
        }
    )


def test_the_whole_front_has_all_kinds_at_each_cost() -> None:
    runs = made_up(
        {
            "vgg16": (0.9, 1000, 0.0),
            "vgg16_6": (0.6, 60, 0.4),
            "vgg16_30": (0.8, 300, 0.4),
            "vgg16_thin_12": (0.65, 120, 0.0),
            "vgg16_gates_12": (0.5, 118, 0.3),
        }
    )
    below, point, above = figures_of(runs)["vgg16"]
    assert (below["share"], point["share"], above["share"]) == (0.06, 0.12, 0.3)
    assert below["pruned"]["macs"] == 60 and above["pruned"]["macs"] == 300
    assert point["thin"]["accuracy"] == pytest.approx([0.65] * 3, abs=0.005)
    assert point["gates"]["macs"] == 118, "what its gates ask for, not the dense network's"
    assert "pruned" not in point, "none was trained at this cost"
    # A network of 60 first, and 300 more for the fifth that it is least sure of: 120 in all.
    narrow = point["network"]
    assert (narrow["looks_first"], narrow["base"]) == ("vgg16_6", "vgg16_30")
    assert narrow["exited"] == pytest.approx([0.8] * 3, abs=0.01)
    assert max(narrow["macs"]) <= 1.02 * 120
    # It goes on with the hardest images, which the second stage gets wrong, too.
    assert narrow["accuracy"] == pytest.approx([0.6] * 3, abs=0.01)


def test_a_network_that_lacks_a_seed_is_left_out() -> None:
    runs = made_up({"vgg16_thin_12": (0.65, 120, 0.0), "vgg16_gates_12": (0.5, 118, 0.3)})
    runs.found = {k: v for k, v in runs.found.items() if not k.startswith("vgg16_gates_12-seed2")}
    (point,) = figures_of(runs)["vgg16"]
    assert set(point) == {"share", "thin"}


def test_answers_of_a_gated_run_cost_what_its_gates_ask_for(tmp_path: Path) -> None:
    settings = [*TINY_RUN, "data.holdout=100", "train.target_macs=0.6"]
    result = fit(apply_overrides(load_config("quickstart"), settings), tmp_path / "run", quiet=True)
    found = collected(tmp_path, "data")
    macs, dense, _ = found["run/costs"].tolist()
    assert 0.3 * dense < macs < 0.9 * dense
    assert macs < dense, "channels that gates close are not counted"
    assert len(found["run/holdout/y"]) == 100
    assert len(found["run/test/network"]) > 100
    assert result.evaluation.macs_share == pytest.approx(macs / dense, abs=0.1)
