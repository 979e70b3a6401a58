"""Stages and learning rates as pure functions of the epoch, so that resuming needs no state."""

from dataclasses import dataclass

from deepmoe.config import TrainConfig

FIRST_RATE = 0.04  # where the one-cycle schedule starts, as a share of its peak


@dataclass(frozen=True)
class TrainingStage:
    """Epochs `start` to `end` (exclusive), with embedding and gates frozen or not."""

    name: str
    start: int
    end: int
    frozen: bool


def stages(train: TrainConfig) -> list[TrainingStage]:
    """Joint training, then fine-tuning of the base network alone."""
    return [
        TrainingStage("joint", 0, train.epochs, frozen=False),
        TrainingStage("finetune", train.epochs, train.total_epochs, frozen=True),
    ]


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
