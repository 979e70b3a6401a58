"""Stages and learning rates as pure functions of the epoch, so that resuming needs no state."""

from dataclasses import dataclass

from deepmoe.config import TrainConfig

FIRST_RATE = 0.04  # where the one-cycle schedule starts, as a share of its peak


@dataclass(frozen=True)
class TrainingStage:
    """Epochs `start` to `end` (exclusive), with embedding and gates frozen or not.

    Where what makes the gates and the base network learn by turns, the one that does not is fixed.
    """

    name: str
    start: int
    end: int
    frozen: bool
    by_turns: bool = False


def stages(train: TrainConfig, *, by_turns: bool = False) -> list[TrainingStage]:
    """Joint training, then fine-tuning of the base network alone.

    Args:
        train: of the run.
        by_turns: epochs of joint training belong to an agent and to the base network in turn.
    """
    tuned = TrainingStage("finetune", train.epochs, train.total_epochs, True, by_turns)
    if not by_turns:
        return [TrainingStage("joint", 0, train.epochs, frozen=False), tuned]
    names = ("agent", "network")
    turns = [
        TrainingStage(names[epoch % 2], epoch, epoch + 1, bool(epoch % 2), by_turns=True)
        for epoch in range(train.epochs)
    ]
    return [*turns, tuned]


def learning_rate(train: TrainConfig, epoch: float) -> float:
    """The learning rate at a (fractional) epoch, counted over both stages."""
    if train.schedule == "constant":
        return train.lr
    if train.schedule == "step":
        return train.lr * train.lr_decay ** sum(epoch >= m for m in train.milestones)
    length = train.total_epochs if train.schedule == "long-cycle" else train.epochs
    if epoch >= length:
        done = (epoch - length) / max(1, train.finetune_epochs)
        return train.finetune_lr * (1 - done)
    done = epoch / length
    if done < train.warmup:
        return train.lr * (FIRST_RATE + (1 - FIRST_RATE) * done / train.warmup)
    return train.lr * (1 - done) / (1 - train.warmup)
