import pytest
import torch
import torch.nn.functional as F

from deepmoe.config import LossConfig
from deepmoe.losses import DeepMoELoss, gate_l1, load_imbalance
from deepmoe.model import DeepMoEOutput


def make_output() -> DeepMoEOutput:
    gates = (torch.rand(4, 6), torch.rand(4, 3))
    return DeepMoEOutput(torch.randn(4, 5), torch.randn(4, 5), gates)


LABELS = torch.tensor([0, 1, 2, 4])


def test_total_is_the_weighted_sum_of_the_parts() -> None:
    output = make_output()
    parts = DeepMoELoss(0.3, embedding=0.7)(output, LABELS)
    torch.testing.assert_close(parts.task, F.cross_entropy(output.logits, LABELS))
    torch.testing.assert_close(parts.embedding, F.cross_entropy(output.embedding_logits, LABELS))
    torch.testing.assert_close(parts.total, parts.task + 0.3 * parts.gates + 0.7 * parts.embedding)


def test_l1_is_summed_or_averaged_over_channels_and_averaged_over_images() -> None:
    gates = (torch.rand(4, 6), torch.rand(4, 3))
    by_hand = sum(g[i, c] for g in gates for i in range(4) for c in range(g.shape[1])) / 4
    torch.testing.assert_close(gate_l1(gates, "sum"), by_hand)
    torch.testing.assert_close(gate_l1(gates, "mean"), gates[0].mean() + gates[1].mean())


def test_weights_follow_their_schedules() -> None:
    loss = DeepMoELoss(((2, 0.0), (4, 1.0)), embedding=((0, 1.0), (10, 0.0)))
    output = make_output()
    for epoch, sparsity, embedding in [(0, 0, 1), (3, 0.5, 0.7), (9, 1, 0.1), (20, 1, 0)]:
        parts = loss(output, LABELS, epoch)
        expected = parts.task + sparsity * parts.gates + embedding * parts.embedding
        torch.testing.assert_close(parts.total, expected)


def test_the_frozen_stage_sees_the_task_alone() -> None:
    config = LossConfig(sparsity=0.5, embedding=1.0, balance=1.0)
    parts = DeepMoELoss.from_config(config, frozen=True)(make_output(), LABELS)
    torch.testing.assert_close(parts.total, parts.task)
    parts = DeepMoELoss.from_config(config)(make_output(), LABELS)
    assert parts.total > parts.task


def test_a_dense_network_has_the_task_loss_only() -> None:
    output = DeepMoEOutput(torch.randn(4, 5), None, None)
    parts = DeepMoELoss(0.5)(output, LABELS)
    assert parts.total == parts.task
    assert parts.gates == parts.embedding == parts.balance == 0


def test_segmentation_ignores_void_pixels() -> None:
    logits = torch.randn(2, 5, 4, 4)
    labels = torch.randint(5, (2, 4, 4))
    labels[:, :2] = 255
    output = DeepMoEOutput(logits, torch.randn(2, 5), (torch.rand(2, 3),))
    parts = DeepMoELoss(ignore_index=255)(output, labels)
    counted = F.cross_entropy(logits[:, :, 2:], labels[:, 2:])
    torch.testing.assert_close(parts.task, counted)
    assert parts.embedding == 0


def test_a_batch_of_void_pixels_costs_nothing() -> None:
    logits = torch.randn(2, 5, 4, 4, requires_grad=True)
    output = DeepMoEOutput(logits, None, None)
    parts = DeepMoELoss(ignore_index=255)(output, torch.full((2, 4, 4), 255))
    assert parts.total == 0
    parts.total.backward()
    assert (logits.grad == 0).all()


def test_load_imbalance_is_zero_when_experts_share_the_work() -> None:
    even = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert load_imbalance([even]) == 0
    uneven = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert load_imbalance([uneven]).item() == pytest.approx(1.0)


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="sum or mean"):
        DeepMoELoss(l1="max")


def test_a_teacher_takes_its_share_of_the_task() -> None:
    output = DeepMoEOutput(torch.randn(4, 3), None, None)
    labels, teacher = torch.tensor([0, 2, -100, 1]), torch.randn(4, 3)
    loss = DeepMoELoss(distillation=0.7, temperature=2.0)
    parts = loss.weighted(output, labels, 0.0, 0.0, teacher)
    counted = [0, 1, 3]
    ours, theirs = ((z[counted] / 2).softmax(dim=1) for z in (output.logits, teacher))
    expected = 4 * (theirs * (theirs / ours).log()).sum(dim=1).mean()
    torch.testing.assert_close(parts.distillation, expected)
    torch.testing.assert_close(parts.total, 0.3 * parts.task + 0.7 * expected)
    assert loss.weighted(output, labels, 0.0, 0.0, output.logits).distillation.abs() < 1e-6
