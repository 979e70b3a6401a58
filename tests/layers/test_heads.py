import pytest
import torch
import torch.nn.functional as F

from deepmoe.errors import UserError
from deepmoe.layers import GateHeads, NoisyTopKHeads

WIDTHS = [4, 7, 3]


def simplex(images: int, dim: int) -> torch.Tensor:
    return torch.randn(images, dim).mul(3).softmax(dim=1)


def test_gates_are_relu_of_a_linear_map_of_each_head() -> None:
    heads = GateHeads(5, WIDTHS, init="normal(0, 1)")
    e = simplex(6, 5)
    gates = heads(e)
    assert [g.shape for g in gates] == [(6, w) for w in WIDTHS]
    for gate, weight in zip(gates, heads.weight.split(WIDTHS), strict=True):
        torch.testing.assert_close(gate, F.relu(e @ weight.T))


def test_gates_stay_between_the_extremes_of_their_row() -> None:
    heads = GateHeads(5, WIDTHS, init="uniform(-0.5, 1)")
    gates = torch.cat(heads(simplex(200, 5)), dim=1)
    low, high = heads.weight.amin(dim=1).relu(), heads.weight.amax(dim=1).relu()
    assert (gates >= low - 1e-6).all()
    assert (gates <= high + 1e-6).all()


def test_initialisations() -> None:
    assert (GateHeads(5, WIDTHS, init="ones").weight == 1).all()
    uniform = GateHeads(50, [100], init="uniform(-0.5, 1)").weight
    assert -0.5 <= uniform.min() < -0.45
    assert 0.95 < uniform.max() <= 1
    normal = GateHeads(50, [100], init="normal(2, 1e-1)").weight
    assert normal.mean().item() == pytest.approx(2, abs=0.01)
    assert normal.std().item() == pytest.approx(0.1, abs=0.01)


def test_heads_may_start_as_a_linear_layer_does() -> None:
    torch.manual_seed(3)
    expected = torch.nn.Linear(100, 1000, bias=False).weight
    torch.manual_seed(3)
    heads = GateHeads(100, [1000], init="linear")
    torch.testing.assert_close(heads.weight, expected)
    assert heads.weight.abs().max().item() <= 0.1  # 1 / sqrt(100)
    opened = (heads(simplex(50, 100))[0] > 0).float().mean().item()
    assert opened == pytest.approx(0.5, abs=0.03)  # half of the gates


def test_starts_that_are_alike_for_all_images() -> None:
    channels = GateHeads(50, [1000], init="channels(2, 0.1)").weight
    assert (channels == channels[:, :1]).all()
    assert float(channels.detach().mean()) == pytest.approx(2, abs=0.05)
    assert float(channels.detach()[:, 0].std()) == pytest.approx(0.1, rel=0.2)
    split = GateHeads(50, [10, 1000], init="split(0.7)").weight
    assert (split == split[:, :1]).all()
    first = split[:, 0]
    assert int((first[:10] == 1).sum()) == 7 and int((first == 1).sum()) == 707
    closed = first[first != 1]
    assert (closed >= -0.5).all() and (closed <= 0).all() and closed.std().item() > 0.1
    spread = GateHeads(50, [10, 5], init="split(0.6, 0.2)").weight
    assert (spread == spread[:, :1]).all()
    for of_layer, number in zip(spread[:, 0].split([10, 5]), (6, 3), strict=True):
        opened = of_layer[of_layer > 0].sort(descending=True).values
        torch.testing.assert_close(opened, torch.linspace(1.2, 0.8, number))


@pytest.mark.parametrize(
    "init",
    [
        "zeros",
        "uniform(1)",
        "split(0.5, 1)",
        "uniform(1.2.3, 4)",
        "split(.)",
        "normal(nan, 1)",
        "uniform(0, 1_0)",
        "split(0.5, x)",
        "split(2)",
        "channels(1)",
        "normal(0, x)",
        "uniform(1, 0)",
        "",
    ],
)
def test_unknown_initialisation_is_refused(init: str) -> None:
    with pytest.raises(UserError, match="gate init"):
        GateHeads(5, WIDTHS, init=init)


def test_gates_are_computed_in_full_precision_under_autocast() -> None:
    heads = GateHeads(5, WIDTHS, init="normal(0, 1)")
    e = simplex(6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        gates = heads(e)
    for gate, exact in zip(gates, heads(e), strict=True):
        assert torch.equal(gate, exact)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("total", ["kept", "one"])
def test_noisy_top_k_keeps_a_share_of_channels(training: bool, total: str) -> None:
    """Their gates are one on average, or sum to one."""
    heads = NoisyTopKHeads(5, [8, 6, 1], share=0.5, total=total).train(training)
    for gate, kept in zip(heads(simplex(9, 5)), [4, 3, 1], strict=True):
        assert ((gate != 0).sum(dim=1) == kept).all()
        expected = torch.full((9,), float(kept if total == "kept" else 1))
        torch.testing.assert_close(gate.sum(dim=1), expected)


def test_noisy_top_k_keeps_the_largest_and_is_noisy_in_training_only() -> None:
    heads = NoisyTopKHeads(5, [8], share=0.25)
    e = simplex(9, 5)
    assert any(not torch.equal(heads(e)[0], heads(e)[0]) for _ in range(5))
    heads.eval()
    (gate,) = heads(e)
    assert torch.equal(gate, heads(e)[0])
    scores = e @ heads.weight.T
    assert torch.equal(gate != 0, scores >= scores.topk(2, dim=1).values[:, -1:])


def test_noisy_top_k_learns_scores_and_noise() -> None:
    heads = NoisyTopKHeads(5, [8], share=0.5)
    heads(simplex(9, 5))[0].square().sum().backward()
    assert heads.weight.grad.abs().sum() > 0
    assert heads.noise_weight.grad.abs().sum() > 0


def test_noisy_top_k_refuses_ties_and_odd_shares() -> None:
    with pytest.raises(UserError, match="ones"):
        NoisyTopKHeads(5, [8], init="ones")
    with pytest.raises(UserError, match="share"):
        NoisyTopKHeads(5, [8], share=0)


def test_closed_channels_stay_closed_for_every_mixture() -> None:
    heads = GateHeads(4, [5, 6], init="normal(1, 1)")
    e = torch.cat([simplex(50, 4), torch.eye(4)])
    before = heads.concatenated(e)
    heads.close(torch.tensor([0, 7]))
    after = heads.concatenated(e)
    assert (after[:, [0, 7]] == 0).all() and (before[:, [0, 7]] > 0).any()
    others = [c for c in range(11) if c not in (0, 7)]
    assert torch.equal(after[:, others], before[:, others])
