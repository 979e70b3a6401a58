"""How far a run is: all that a checkpoint holds besides tensors."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """The place in a run from which training goes on."""

    epoch: int = 0  # finished epochs, over both stages
    batch: int = 0  # finished batches of the epoch after them
    sums: tuple[float, ...] = ()  # of that epoch's losses and counts so far
    best: float | None = None  # best accuracy so far
