import pytest
import torch
import torch.nn.functional as F
from helpers import counted_macs

from deepmoe.errors import UserError
from deepmoe.layers import Decisions, FeatureBoosting, PruningAgent
from deepmoe.layers.agent import agent_loss
from deepmoe.layers.feature_heads import LARGEST

INPUTS, WIDTHS = [3, 8, 5], [8, 5, 7]


def boosting(share: float) -> FeatureBoosting:
    heads = FeatureBoosting(INPUTS, WIDTHS, share=share)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


def test_boosting_gates_are_relu_of_pooled_sizes_for_the_winners_alone() -> None:
    heads, x = boosting(0.5), torch.randn(6, 8, 4, 4)
    found = heads.start().gates(1, x, 1)
    layer = heads.layers[1]
    for image in range(6):
        sizes = [x[image, c].abs().sum() / 16 for c in range(8)]
        scores = [sum(layer.weight[o, c] * sizes[c] for c in range(8)) for o in range(5)]
        scores = torch.stack(scores) + layer.bias
        winners = scores.argsort(descending=True)[:2]  # of five channels, half are two
        expected = torch.zeros(5)
        expected[winners] = F.relu(scores[winners])
        torch.testing.assert_close(found[image], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.7, 1.0])
def test_exactly_the_share_of_channels_runs_for_every_image(share) -> None:
    heads = boosting(share)
    for number, (read, made) in enumerate(zip(INPUTS, WIDTHS, strict=True)):
        gates = heads.start().gates(number, torch.randn(50, read, 2, 2), 1)
        assert ((gates != 0).sum(dim=1) == max(1, round(share * made))).all()
        assert (gates >= 0).all()


def test_ties_and_dead_heads_do_not_change_the_number() -> None:
    heads = FeatureBoosting(INPUTS, WIDTHS, share=0.5)
    for parameter in heads.parameters():
        torch.nn.init.zeros_(parameter)  # all alike, and no ReLU open
    gates = heads.start().gates(0, torch.randn(9, 3, 2, 2), 1)
    assert ((gates != 0).sum(dim=1) == 4).all()
    assert gates.max() < 1e-5


def test_weights_start_in_units_of_hes_and_biases_at_one() -> None:
    for spread in (0.0, 0.1, 1.0):
        layer = FeatureBoosting([200], [300], spread=spread).layers[0]
        assert layer.weight.std().item() == pytest.approx(spread * 0.1, rel=0.05)  # (2 / 200)^0.5
        assert layer.bias.eq(1).all()


def test_gates_grow_with_features_only_so_far() -> None:
    heads, x = boosting(1.0), torch.randn(20, 8, 4, 4)
    with torch.no_grad():
        found = [heads.start().gates(1, size * x, 1).max() for size in (0.1, 1, 1e6, 1e30)]
    assert 0 < found[0] < found[1] < found[2] == found[3] == LARGEST


def test_gates_are_made_in_full_precision_under_autocast() -> None:
    heads, x = boosting(0.5), torch.randn(64, 8, 4, 4)
    plain = heads.start().gates(1, x, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(heads.start().gates(1, x, 1), plain)
        half = heads.start().gates(1, x.bfloat16(), 1)
    assert half.dtype == torch.float32
    assert ((half != 0).sum(dim=1) == 2).all()


def test_only_winners_learn_and_a_share_can_be_changed() -> None:
    heads, x = boosting(1.0), torch.randn(1, 3, 2, 2)
    heads.keep(0.25)
    gates = heads.start().gates(0, x, 1)
    gates.sum().backward()
    moved = heads.layers[0].weight.grad.abs().sum(dim=1) > 0
    assert int(moved.sum()) <= int((gates != 0).sum()) == 2
    assert not moved[gates[0] == 0].any()


def test_linear_makers_have_their_channels_last() -> None:
    heads, x = boosting(0.5), torch.randn(4, 6, 8)
    moved = x.movedim(-1, 1)[..., None]
    torch.testing.assert_close(heads.start().gates(1, x, -1), heads.start().gates(1, moved, 1))
    flat = x[:, 0]
    expected = heads.start().gates(1, flat[:, :, None, None], 1)
    torch.testing.assert_close(heads.start().gates(1, flat, -1), expected)


def agent(**options: float) -> PruningAgent:
    heads = PruningAgent(INPUTS, WIDTHS, **options)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    return heads.eval()


def decide(heads: PruningAgent, images: int = 20) -> tuple[list[torch.Tensor], Decisions]:
    on_the_way = heads.start()
    inputs = [torch.randn(images, read, 3, 3) for read in INPUTS]
    gates = [on_the_way.gates(n, x, 1) for n, x in enumerate(inputs)]
    return gates, on_the_way.decisions


def test_an_action_runs_the_first_groups_of_the_strongest_channels() -> None:
    heads = agent()
    strengths = [torch.rand(width) for width in WIDTHS]
    heads.order_by_strength(strengths)
    gates, decisions = decide(heads)
    assert len(decisions.actions_BL.unique()) > 1  # else this says little
    for number, g_BC in enumerate(gates):
        order = strengths[number].argsort(descending=True)
        for image, action in enumerate(decisions.actions_BL[:, number].tolist()):
            running = -(-WIDTHS[number] * (action + 1) // 4)
            assert g_BC[image, order[:running]].eq(1).all()
            assert g_BC[image, order[running:]].eq(0).all()


def test_greedy_actions_are_the_best_ones_and_new_agents_run_everything() -> None:
    _, decisions = decide(agent())
    assert torch.equal(decisions.actions_BL, decisions.values_BLA.argmax(dim=2))
    assert decisions.values_BLA.min() < 0 < decisions.values_BLA.max()  # no ReLU on values
    gates, decisions = decide(PruningAgent(INPUTS, WIDTHS).eval())
    assert all(g.eq(1).all() for g in gates)
    assert decisions.values_BLA.abs().max() == 0


def test_a_shift_makes_more_channels_dearer() -> None:
    heads = agent()
    running = []
    for shift in (-100.0, 0.0, 100.0):
        heads.shift.fill_(shift)
        torch.manual_seed(1)
        running.append(decide(heads)[1].actions_BL.double().mean().item())
    assert running[0] == 3 > running[1] > running[2] == 0


def test_it_explores_in_training_as_much_as_epsilon_says() -> None:
    heads = agent().train()
    for epsilon in (0.0, 0.4, 1.0):
        heads.epsilon.fill_(epsilon)
        _, decisions = decide(heads, images=2000)
        other = decisions.actions_BL != decisions.values_BLA.argmax(dim=2)
        assert other.double().mean().item() == pytest.approx(0.75 * epsilon, abs=0.03)
    torch.manual_seed(3)
    _, one = decide(heads)
    torch.manual_seed(3)
    _, again = decide(heads)
    assert torch.equal(one.actions_BL, again.actions_BL)


def test_it_remembers_earlier_layers_and_looks_without_changing_anything() -> None:
    heads = agent()
    x, other = (torch.randn(4, 3, 3, 3, requires_grad=True) for _ in range(2))
    second, values = torch.randn(4, 8, 3, 3), []
    for first in (x, other):
        on_the_way = heads.start()
        on_the_way.gates(0, first, 1)
        on_the_way.gates(1, second, 1)
        values.append(on_the_way.decisions.values_BLA[:, 1])
    assert (values[0] - values[1]).abs().max() > 1e-3
    values[0].sum().backward()
    assert x.grad is None and heads.encoders[0].weight.grad.abs().sum() > 0


def test_own_macs_are_those_that_pytorch_counts() -> None:
    for heads in (boosting(0.5), agent(groups=3, hidden=6)):
        on_the_way = heads.start()
        total = sum(
            counted_macs(on_the_way.gates, number, torch.randn(1, read, 2, 2), 1)
            for number, read in enumerate(INPUTS)
        )
        assert heads.macs == total


def test_the_loss_of_an_agent_is_that_of_q_learning_by_hand() -> None:
    values = torch.tensor([[[0.1, -0.2, 0.3], [-0.5, -0.4, -0.9]]], requires_grad=True)
    decisions = Decisions(values, torch.tensor([[1, 2]]), torch.tensor(-0.05))
    found = agent_loss(decisions, torch.tensor([-2.0]), discount=0.9)
    first = -0.05 * 1 + 0.9 * -0.4 - -0.2  # r + g max Q(s') - Q(s, a)
    last = -0.05 * 2 - 2.0 - -0.9
    assert found.item() == pytest.approx((first**2 + last**2) / 2, rel=1e-5)
    found.backward()
    expected = torch.zeros_like(values)  # targets are no function of the values
    expected[0, 0, 1], expected[0, 1, 2] = -first, -last
    torch.testing.assert_close(values.grad, expected)


# A made-up problem of two layers. What is left of the task's loss depends on the kind of image and
# on both actions; a group beyond the first costs 0.1. For each kind, one pair of actions is best.
LOSSES = {
    0: lambda a, b: 0.0,  # easy: whatever runs
    1: lambda a, b: float(a < 2) + float(b < 1),  # needs 2 in the first layer, 1 in the second
    2: lambda a, b: 0.5 if a < 3 and b < 3 else 0.0,  # needs all of one: 3 groups cost 0.3
    3: lambda a, b: 0.2 * (6 - a - b) / 6,  # each group gains 0.033: not worth 0.1
}
PENALTY = -0.1


def best_return(kind: int) -> tuple[float, set[tuple[int, int]]]:
    returns = {(a, b): PENALTY * (a + b) - LOSSES[kind](a, b) for a in range(4) for b in range(4)}
    best = max(returns.values())
    return best, {pair for pair, value in returns.items() if value > best - 1e-9}


def play(heads: PruningAgent, kinds: torch.Tensor) -> tuple[Decisions, torch.Tensor]:
    """A pass of images of these kinds: features tell the kind at first, then what has run."""
    seen = F.one_hot(kinds, 4).float()[:, :, None, None]
    on_the_way = heads.start()
    first = on_the_way.gates(0, seen, 1)
    on_the_way.gates(1, first.detach()[:, :, None, None], 1)  # it has to remember the kind
    decisions = on_the_way.decisions
    pairs = zip(kinds.tolist(), decisions.actions_BL.tolist(), strict=True)
    return decisions, torch.tensor([LOSSES[kind](*actions) for kind, actions in pairs])


def test_the_agent_finds_the_optimum_of_a_problem_that_has_one() -> None:
    assert {kind: best_return(kind)[1] for kind in LOSSES} == {
        0: {(0, 0)},
        1: {(2, 1)},
        2: {(0, 3), (3, 0)},
        3: {(0, 0)},
    }
    heads = PruningAgent([4, 4], [4, 4], hidden=16, penalty=PENALTY).train()
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.01)
    steps = 500
    for step in range(steps):
        heads.epsilon.fill_(1 - 0.9 * step / steps)
        decisions, losses = play(heads, torch.randint(4, (128,)))
        optimizer.zero_grad()
        agent_loss(decisions, -losses).backward()
        optimizer.step()
    kinds = torch.arange(4)
    with torch.no_grad():
        decisions, _ = play(heads.eval(), kinds)
    for kind, actions in enumerate(decisions.actions_BL.tolist()):
        best, pairs = best_return(kind)
        assert tuple(actions) in pairs, kind
        value = decisions.values_BLA[kind, 0].max().item()
        assert value == pytest.approx(best, abs=0.05), kind  # and knows what it is worth


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UserError, match="share of kept channels"):
        FeatureBoosting(INPUTS, WIDTHS, share=0.0)
    with pytest.raises(UserError, match="below 0"):
        PruningAgent(INPUTS, WIDTHS, penalty=0.1)
