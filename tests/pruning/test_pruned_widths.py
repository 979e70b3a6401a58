"""Which channels are removed, and how many of each group."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from helpers import randomise_statistics
from prunable_networks import IMAGES, LABELS, Small, dense, loader
from torch import Tensor, nn

from deepmoe.compare.widths import widths_for
from deepmoe.costs import cost_matrix, macs_of_counts
from deepmoe.errors import UserError
from deepmoe.evaluation.importance import channel_importance
from deepmoe.graph import Gating, describe, prunable
from deepmoe.model import DeepMoE
from deepmoe.pruning import prune
from deepmoe.registry import create_model


def test_importance_is_what_the_loss_feels_of_a_gate_at_temperature_4() -> None:
    network, x = randomise_statistics(Small()).double().eval(), IMAGES[:, :, :8, :8].double()
    nn.init.zeros_(network.two.weight[:, 2])  # nobody reads this channel
    graph = describe(network, x)
    gating = prunable(graph)
    assert gating.widths == (4, 6)
    model = DeepMoE(None, None, network.train(), gating)

    expected = torch.zeros(10, dtype=torch.float64)
    network.eval()
    for image, label in zip(x[:10], LABELS[:10], strict=True):  # one by one
        gates = torch.ones(10, dtype=torch.float64, requires_grad=True)
        y = F.relu(network.norm(network.one(image[None]))) * gates[:4, None, None]
        y = F.relu(network.two(y)).mean(dim=(2, 3)) * gates[4:]
        loss = F.cross_entropy(network.fc(y) / 4, label[None])
        expected += torch.autograd.grad(loss, gates)[0].abs()
    network.train()

    found = channel_importance(model, gating, loader(x).epoch(0), 10)  # not all 12
    torch.testing.assert_close(found, expected)
    assert found[2] == 0 < found[[0, 1, 3]].min()
    assert network.training and all(p.grad is None for p in network.parameters())


@pytest.fixture(scope="module")
def wide() -> Gating:
    with torch.device("meta"):
        return prunable(create_model("vgg16", gates=None).gating.graph)


def macs(gating: Gating, widths: Sequence[float]) -> float:
    counts = torch.tensor([widths], dtype=torch.float64)
    return macs_of_counts(counts, cost_matrix(gating, 32)).item()


def random_importance(gating: Gating) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(len(gating.widths), generator=generator) * 4
    return [
        torch.rand(width, generator=generator, dtype=torch.float64) * 10**scale
        for width, scale in zip(gating.widths, spread.tolist(), strict=True)
    ]


@pytest.mark.parametrize("tilt", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.3, 0.12, 0.05])
def test_widths_meet_the_cost_and_come_near_it(wide: Gating, share: float, tilt: float) -> None:
    kept = widths_for(wide, 32, random_importance(wide), share, tilt)
    assert all(1 <= left <= width for left, width in zip(kept, wide.widths, strict=True))
    found = macs(wide, kept) / macs(wide, wide.widths)
    assert 0.85 * share <= found <= share  # groups of one width step together
    odd = [left for left, width in zip(kept, wide.widths, strict=True) if left % 4 and left < width]
    assert not odd


def test_without_a_tilt_every_group_keeps_about_the_same_share(wide: Gating) -> None:
    full = torch.tensor(wide.widths)
    importance = random_importance(wide)
    even, tilted, steep = (
        torch.tensor(widths_for(wide, 32, importance, 0.25, tilt)) / full for tilt in (0, 0.5, 1)
    )
    assert even.max() - even.min() <= 4 / 64  # to what is rounded
    assert even.std() < tilted.std() < steep.std()


def test_with_a_full_tilt_groups_keep_what_is_worth_more_for_each_mac(wide: Gating) -> None:
    """Importance in proportion to cost: all groups are alike, but for one made dear or cheap."""
    quadratic, full = cost_matrix(wide, 32), torch.tensor([*wide.widths, 1.0]).double()
    costs = ((quadratic + quadratic.T) @ full)[:-1]
    generator = torch.Generator().manual_seed(0)
    alike = [
        cost * torch.rand(width, generator=generator, dtype=torch.float64)
        for cost, width in zip(costs, wide.widths, strict=True)
    ]

    def kept(factor: float, tilt: float) -> float:
        """The share that the sixth group keeps when it is worth this much more."""
        importance = [part * (factor if i == 5 else 1) for i, part in enumerate(alike)]
        return widths_for(wide, 32, importance, 0.5, tilt)[5] / wide.widths[5]

    assert kept(0.1, 1) < 0.5 * kept(1, 1) and kept(1, 1) < 0.8 * kept(10, 1)
    assert kept(0.1, 0) == kept(1, 0) == kept(10, 0)


def test_a_share_out_of_reach_gets_one_sentence(wide: Gating) -> None:
    importance = random_importance(wide)
    for share in (0.0001, 1.1):
        with pytest.raises(UserError, match=r"goes from 1 down to 0\.00\d") as told:
            widths_for(wide, 32, importance, share, 0.5)
        assert "\n" not in str(told.value)
    # Streams whose widths the network's code relies on can't go.
    with pytest.raises(UserError, match=r"can't leave 0.01 of the MACs: .* down to 0\.\d+"):
        prune(dense("resnet20"), 32, 0.01, loader())
