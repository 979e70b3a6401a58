import pytest

from deepmoe.config import TrainConfig
from deepmoe.training.schedules import learning_rate, stages


def test_the_papers_steps() -> None:
    train = TrainConfig(
        epochs=270, finetune_epochs=80, lr=0.1, schedule="step", milestones=(150, 250)
    )
    rates = [learning_rate(train, epoch) for epoch in (0, 149.9, 150, 249, 250, 349)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    joint, finetune = stages(train)
    assert (joint.start, joint.end, joint.frozen) == (0, 270, False)
    assert (finetune.start, finetune.end, finetune.frozen) == (270, 350, True)


def test_one_cycle_rises_falls_and_starts_anew_when_frozen() -> None:
    train = TrainConfig(epochs=10, finetune_epochs=4, lr=1.0, warmup=0.2, finetune_lr=0.1)
    rates = [learning_rate(train, epoch) for epoch in (0, 1, 2, 6, 9.99, 10, 12, 13.99)]
    assert rates == pytest.approx([0.04, 0.52, 1.0, 0.5, 0.0, 0.1, 0.05, 0.0], abs=2e-3)


def test_a_long_cycle_falls_through_both_stages() -> None:
    train = TrainConfig(epochs=6, finetune_epochs=4, lr=1.0, warmup=0.2, schedule="long-cycle")
    rates = [learning_rate(train, epoch) for epoch in (0, 1, 2, 6, 8, 9.99)]
    assert rates == pytest.approx([0.04, 0.52, 1.0, 0.5, 0.25, 0.0], abs=2e-3)
    dense = TrainConfig(epochs=10, finetune_epochs=0, lr=1.0, warmup=0.2)
    assert rates == pytest.approx([learning_rate(dense, e) for e in (0, 1, 2, 6, 8, 9.99)])


@pytest.mark.parametrize("epoch", [0, 5, 99])
def test_constant(epoch: int) -> None:
    assert learning_rate(TrainConfig(schedule="constant", lr=0.3), epoch) == 0.3


def test_warm_up_may_take_the_whole_stage() -> None:
    assert learning_rate(TrainConfig(epochs=4, lr=1.0, warmup=1.0), 3.99) == pytest.approx(
        1, abs=0.01
    )
