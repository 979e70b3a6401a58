"""Images grouped by the channels they run."""

import pytest
import torch
from helpers import random_gates

from deepmoe.sparse import route_groups


@pytest.mark.parametrize("colliding", [False, True])
def test_images_are_grouped_by_pattern_and_not_by_value(
    colliding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = random_gates([5, 7], 6)
    for g in gates:
        g[4], g[5] = 3.0 * g[1], g[1]
    if colliding:  # every pattern gets the same number
        monkeypatch.setattr(route_groups, "_keys", lambda channels, device: torch.zeros(channels))
    groups = sorted(part.tolist() for part in route_groups.parts_by_route(tuple(gates)))
    assert groups == [[0], [1, 4, 5], [2], [3]]
