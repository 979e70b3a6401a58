"""How many channels are left: alike in all groups, or by one threshold."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from deepmoe.compare import SELECTORS
from deepmoe.compare.widths import even_widths, widths_by_threshold
from deepmoe.config import PruneBy
from deepmoe.costs import cost_matrix, macs_of_counts
from deepmoe.errors import UserError
from deepmoe.graph import Gating, prunable
from deepmoe.registry import create_model


@pytest.fixture(scope="module", params=["vgg16", "resnet18_cifar"])
def gating(request: pytest.FixtureRequest) -> Gating:
    with torch.device("meta"):
        return prunable(
            create_model(request.param, gates=None, block="basic").gating.graph
            if request.param != "vgg16"
            else create_model("vgg16", gates=None).gating.graph
        )


def share_of(gating: Gating, widths: tuple[int, ...]) -> float:
    counts = torch.tensor([widths, gating.widths], dtype=torch.float64)
    left, whole = macs_of_counts(counts, cost_matrix(gating, 32)).tolist()
    return left / whole


def streams(gating: Gating) -> list[bool]:
    return [gating.graph.groups[number].is_stream for number in gating.gated]


def scores_of(gating: Gating, fixed: list[bool]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(w, generator=generator) + 0.05 * i for i, w in enumerate(gating.widths)]
    return [None if keeps else part for keeps, part in zip(fixed, drawn, strict=True)]


@pytest.mark.parametrize("share", [1.0, 0.8, 0.5, 0.3])
def test_even_widths_meet_the_cost_and_come_near_it(gating: Gating, share: float) -> None:
    fixed = streams(gating)
    widths = even_widths(gating, 32, share, fixed)
    assert 0.985 * share <= share_of(gating, widths) <= share
    shares = []
    for left, full, keeps in zip(widths, gating.widths, fixed, strict=True):
        if keeps:
            assert left == full
        else:
            shares.append(left / full)
            assert left == full or left % 4 == 0
    assert max(shares) - min(shares) <= 0.13  # two steps of a group of 64 channels


@pytest.mark.parametrize("share", [1.0, 0.8, 0.5, 0.3])
def test_one_threshold_meets_the_cost_to_a_channel(gating: Gating, share: float) -> None:
    fixed = streams(gating)
    scores = scores_of(gating, fixed)
    widths = widths_by_threshold(gating, 32, share, scores)
    assert 0.99 * share <= share_of(gating, widths) <= share
    kept, gone = [], []
    for part, left, full in zip(scores, widths, gating.widths, strict=True):
        if part is None:
            assert left == full
        else:
            ordered = part.sort(descending=True).values.tolist()
            kept.append(min(ordered[:left]))
            if left > -(-full // 32):  # not at its floor
                gone += ordered[left:]
    assert not gone or max(gone) <= min(kept)


def test_no_group_is_emptied(gating: Gating) -> None:
    fixed = streams(gating)
    first = fixed.index(False)
    scores = scores_of(gating, fixed)
    scores[first] = torch.zeros(gating.widths[first])  # all below any threshold
    widths = widths_by_threshold(gating, 32, 0.5, scores)
    assert widths[first] == -(-gating.widths[first] // 32)


@pytest.mark.parametrize("share", [0.001, 1.2])
def test_a_share_out_of_reach_gets_one_sentence(gating: Gating, share: float) -> None:
    fixed = streams(gating)
    for make in (
        lambda: even_widths(gating, 32, share, fixed),
        lambda: widths_by_threshold(gating, 32, share, scores_of(gating, fixed)),
    ):
        with pytest.raises(UserError, match=r"can't leave .* goes from 1 down to 0\.\d+$"):
            make()


def test_every_method_that_a_configuration_names_is_there() -> None:
    assert set(SELECTORS) == set(get_args(PruneBy))
