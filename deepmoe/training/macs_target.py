"""How a run comes to the MACs that it asks for: a budget of gates, or heads that are steered."""

from lightning_fabric import Fabric

from deepmoe.budget import MacsBudget
from deepmoe.config import TrainConfig
from deepmoe.data import DataSource
from deepmoe.layers import Gates
from deepmoe.model import DeepMoE
from deepmoe.processes import copy_from_first_process
from deepmoe.training.steering import steering_for


class MacsTarget:
    """What a run does for its target, before and after its steps and at the end of epochs.

    Args:
        train: of the run's configuration.
        fabric: launched.
        model: that is trained.
        data: to train and to measure costs with.

    Raises:
        UserError: where the target can't be met.
    """

    def __init__(
        self, train: TrainConfig, fabric: Fabric, model: DeepMoE, data: DataSource
    ) -> None:
        self.train, self.fabric, self.model, self.data = train, fabric, model, data
        self.steering = steering_for(model, data.info.size, train.target_macs, train.budget_ramp)
        self.budget = self._make_budget()

    def before_step(self, epoch: float) -> None:
        """Sets heads that are steered for a step at this part of the run."""
        if self.steering is not None:
            self.steering.before(self._progress(epoch))

    def after_step(self, gates: Gates | None, epoch: float) -> None:
        """Moves a budget's thresholds after a step of the joint stage, by its batch's gates."""
        if self.budget is not None and gates is not None:
            self.budget.step(gates, epoch / self.train.epochs)

    def meet(self, epochs: int, *, learns: bool) -> None:
        """What the joint stage ends with, and for some heads every epoch.

        Args:
            epochs: that are done.
            learns: whether what makes the gates has learnt in the last one.
        """
        if self.steering is not None:
            with self.fabric.autocast():  # as in the steps
                calibration = self.data.calibration
                self.steering.settle(self.model, calibration, self._progress(epochs), learns)
            for tensor in self.steering.settled:
                copy_from_first_process(tensor)  # each saw images of its own
        if self.budget is not None:
            self.budget.calibrate(self.model, self.data.calibration)
            copy_from_first_process(self.budget.heads.weight)  # each saw images of its own

    def _progress(self, epoch: float) -> float:
        """How far the joint stage is, from 0 to 1."""
        return min(1.0, epoch / self.train.epochs) if self.train.epochs else 1.0

    def _make_budget(self) -> MacsBudget | None:
        train = self.train
        if train.target_macs is None or not self.model.gated or self.steering is not None:
            return None
        steps = train.epochs * self.data.train.batches_per_epoch
        return MacsBudget(
            self.model,
            self.data.info.size,
            train.target_macs,
            steps=steps,
            ramp=train.budget_ramp,
            floor=train.channel_floor,
        )
