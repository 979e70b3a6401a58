"""The training loop: stages, epochs, batches; checkpoints, interruption and divergence."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from lightning_fabric import Fabric
from torch import Tensor

from deepmoe.checkpoint import TrainState, save_checkpoint
from deepmoe.config import RunConfig
from deepmoe.costs import count_macs, dense_macs
from deepmoe.data import Batch, DataSource, derive_seed
from deepmoe.data.segmentation_files import VOID
from deepmoe.errors import OutputClosed, TrainingDiverged, TrainingInterrupted, UserError
from deepmoe.evaluation import evaluate_on
from deepmoe.layers import PruningAgent, RouteCodebook, ScaleFactors
from deepmoe.losses import DeepMoELoss, LossParts
from deepmoe.model import DeepMoE, can_be_captured
from deepmoe.processes import any_process, from_first_process, process_count, sum_over_processes
from deepmoe.training.checkpoint_store import CheckpointStore
from deepmoe.training.codebook_learning import check_codes, learn_codebook
from deepmoe.training.epoch_figures import Result, epoch_figures, reported
from deepmoe.training.interrupts import Interrupts, Stopped, UntilStopped
from deepmoe.training.log import RunLog
from deepmoe.training.macs_target import MacsTarget
from deepmoe.training.schedules import TrainingStage, learning_rate, stages
from deepmoe.training.step import EagerStep, GraphedStep, Objective
from deepmoe.training.teachers import Teachers

LOOK_EVERY = 20  # batches between looks at figures, which wait for the device


class _DataFailed(Exception):
    """Training images could not be had."""


class Trainer:
    """Trains a model through both stages, from wherever its state stands.

    Args:
        config: of the run.
        fabric: launched; moves, wraps and differentiates.
        model: on Fabric's device.
        optimizer: of the model's parameters.
        data: loaders to train and to evaluate with.
        store: of checkpoints.
        state: how far the run is.
        teachers: whose outputs are learnt from, if there are any.
    """

    def __init__(
        self,
        config: RunConfig,
        fabric: Fabric,
        model: DeepMoE,
        optimizer: torch.optim.Optimizer,
        data: DataSource,
        store: CheckpointStore,
        state: TrainState,
        teachers: Teachers | None = None,
    ) -> None:
        self.config = config
        self.fabric = fabric
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.store = store
        self.log: RunLog | None = None
        self.state = state
        self.teachers = teachers
        self.interrupts = Interrupts()
        self.target = MacsTarget(config.train, fabric, model, data)
        codes = config.train.codes
        if codes is not None:  # a mistake is told now, not when they are learnt hours later
            from_first_process(lambda: check_codes(codes, data.calibration.images))
        self.saved_at = time.monotonic()
        self.closed: str | None = None  # what happened to the output, if it can't be written to
        self.unsaved: list[dict[str, Any]] = []  # metrics of epochs that no checkpoint has yet
        self.result: Result | None = None
        self.looked_at = torch.zeros(0)  # the sums at the last look

    def run(self, log: RunLog | None) -> Result:
        """Trains to the end; returns the last evaluation.

        Args:
            log: of metrics; `None` in all processes but one.
        """
        self.log = log
        per_epoch = self.data.train.batches_per_epoch
        total = self.config.train.total_epochs * per_epoch
        done = self.state.epoch * per_epoch + self.state.batch
        with self.interrupts:
            if self.log is None:
                self._run_stages()
            else:
                with self.log.progress(done, total):
                    self._run_stages()
        self.model.eval()
        return self.result or self._evaluate()

    def _run_stages(self) -> None:
        if not self.config.train.epochs and self.state == TrainState():
            self.target.meet(0, learns=False)
        prepared: dict[tuple[bool, bool], EagerStep] = {}
        for stage in stages(self.config.train, by_turns=takes_turns(self.model)):
            if self.state.epoch >= stage.end:
                continue
            codes = self.config.train.codes
            if stage.frozen and codes is not None and self.model.codebook is None:
                self.model.codebook = self._learn_codebook(codes)
            kind = (stage.frozen, stage.by_turns)
            if kind not in prepared:
                prepared[kind] = self.prepare(stage)
            for epoch in range(max(self.state.epoch, stage.start), stage.end):
                self._run_epoch(prepared[kind], stage, epoch)

    def prepare(self, stage: TrainingStage) -> EagerStep:
        """A stage's training step: frozen where it is, compiled and captured where that pays."""
        set_stage(self.model, stage)
        train, on_cuda = self.config.train, self.fabric.device.type == "cuda"
        objective = Objective(self.model, self._loss(stage), self.teachers)
        captured = on_cuda and can_be_captured(objective)
        if train.compile == "on" or (train.compile == "auto" and captured):
            objective.compile(dynamic=False)
        wrapped, optimizer = self.fabric.setup(objective, self.optimizer)
        graphs = train.cuda_graphs == "auto" and captured and process_count() == 1
        return (GraphedStep if graphs else EagerStep)(wrapped, optimizer, self.fabric)

    def _run_epoch(self, step: EagerStep, stage: TrainingStage, epoch: int) -> None:
        start, train = time.perf_counter(), self.config.train
        totals = sum_over_processes(self.train_epoch(step, stage, epoch))
        losses, last = epoch_figures(totals), epoch + 1 == train.total_epochs
        if not losses.pop("labels"):
            raise UserError("no pixel of the training images has a label")
        # What features make of a budget changes whenever the network does.
        settles = epoch + 1 == train.epochs or takes_turns(self.model)
        if settles and not self.state.budget_met:
            self.target.meet(epoch + 1, learns=not stage.frozen)
        trained = self._state_at(epoch, self.data.train.batches_per_epoch, totals, budget_met=True)
        self.result, is_best = None, False
        if (epoch + 1) % train.evaluate_epochs == 0 or last:
            self.result = self._evaluate(trained)
            is_best = self.state.best is None or self.result.accuracy > self.state.best
        best = self.result.accuracy if self.result and is_best else self.state.best
        skipped = torch.tensor(float(self.data.train.skipped), device=self.fabric.device)
        metrics = {
            "epoch": epoch + 1,
            "stage": stage.name,
            "lr": learning_rate(train, epoch),
            **losses,
            **(reported(self.result) if self.result else {}),
            "skipped_images": int(sum_over_processes(skipped)) + self.data.evaluation.skipped,
            "seconds": round(time.perf_counter() - start, 3),
        }
        self.unsaved.append(metrics)
        self.state = TrainState(epoch + 1, best=best, is_best=is_best)
        if (epoch + 1) % train.checkpoint_epochs == 0 or last or is_best:
            self._save(self.state)
            if self.fabric.is_global_zero:
                self.store.keep_epoch(self.state)
        if self.log is not None:
            self._tell(partial(self.log.tell_epoch, metrics, train.total_epochs))

    def train_epoch(self, step: EagerStep, stage: TrainingStage, epoch: int) -> Tensor:
        """Trains from the state's batch on; returns sums of loss parts, hits and labels."""
        set_stage(self.model, stage)
        device, loader, train = self.fabric.device, self.data.train, self.config.train
        loss = self._loss(stage)
        sums = torch.zeros(len(LossParts._fields) + 3, dtype=torch.float64, device=device)
        self.looked_at = sums.clone()
        self._check_place(len(sums))
        if self.state.sums:  # of all processes together, so one goes on with them
            self.looked_at += torch.tensor(self.state.sums, dtype=torch.float64, device=device)
            sums += self.looked_at * self.fabric.is_global_zero
        done = self.state.batch
        try:
            for batch in self._training_batches(epoch, done):
                # Noise in the model depends on seed and batch alone: a resumed run repeats it.
                torch.manual_seed(derive_seed(train.seed, epoch, done, 1))
                now = epoch + done / loader.batches_per_epoch
                self.target.before_step(now)
                figures, gates = step(batch, learning_rate(train, now), *loss.weights(now))
                done += 1
                if not stage.frozen:
                    self.target.after_step(gates, epoch + done / loader.batches_per_epoch)
                sums += figures
                self._after_batch(epoch, done, sums, gates)
        except _DataFailed as error:
            if process_count() > 1:  # others would have to agree to save
                raise UserError(str(error)) from error
            self._save(self._state_at(epoch, done, sums))
            raise UserError(f"{error}; {self.store.last} is saved") from error
        return sums

    def _training_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        try:
            yield from self.data.train.epoch(epoch, start)
        except UserError as error:
            raise _DataFailed(str(error)) from error

    def _check_place(self, figures: int) -> None:
        """Refuses to go on from a place that the data, or this version, does not have."""
        if self.state.batch > self.data.train.batches_per_epoch:
            raise UserError(
                f"{self.store.last} is {self.state.batch} batches into an epoch that has only "
                f"{self.data.train.batches_per_epoch}"
            )
        if self.state.sums and len(self.state.sums) != figures:
            raise UserError(
                f"{self.store.last} is from within an epoch of another version; "
                "resume from the checkpoint of a finished epoch"
            )

    def _state_at(
        self, epoch: int, batch: int, totals: Tensor, *, budget_met: bool = False
    ) -> TrainState:
        """The place after this batch of the epoch."""
        return TrainState(
            epoch, batch, tuple(totals.tolist()), best=self.state.best, budget_met=budget_met
        )

    def _loss(self, stage: TrainingStage) -> DeepMoELoss:
        ignore = VOID if self.data.info.task == "segmentation" else -100
        loss = self.config.loss
        if isinstance(self.model.heads, ScaleFactors):
            loss = dataclasses.replace(loss, sparsity=0.0)  # the optimiser shrinks these
        return DeepMoELoss.from_config(loss, frozen=stage.frozen, ignore_index=ignore)

    def _after_batch(self, epoch: int, done: int, sums: Tensor, gates: Any) -> None:
        """What may happen between two batches: a stop, a checkpoint, a look at the figures."""
        look = done % LOOK_EVERY == 0 or done == self.data.train.batches_per_epoch
        stop = self._wish is not None
        minutes = (time.monotonic() - self.saved_at) / 60
        due = minutes > self.config.train.checkpoint_minutes
        if process_count() > 1:
            # Every process must decide alike, so all ask each other at the same batches.
            device = self.fabric.device
            stop, due = (look and any_process(flag, device) for flag in (stop, due))
        if look or stop or due:
            totals = sum_over_processes(sums)
            self._check_loss(totals - self.looked_at)
            self.looked_at = totals
        if stop or due:
            state = self._state_at(epoch, done, totals)
            where = f"after batch {done} of epoch {epoch + 1}"
            if stop:
                self._stop(where, state)
            self._save(state)
        if self.log is not None:
            figures = self._figures(totals, gates) if look and self.log.wants_figures else None
            at = epoch * self.data.train.batches_per_epoch + done
            self.log.advance(at, f"{epoch + 1}/{self.config.train.total_epochs}", figures)

    def _tell(self, tell: Callable[[], None]) -> None:
        """Tells the person watching; if nobody can be told any more, that is a wish to stop."""
        try:
            tell()
        except OutputClosed as error:
            assert self.log is not None
            self.log.quiet, self.closed = True, str(error)

    @property
    def _wish(self) -> str | None:
        """Why the run is to stop, if it is."""
        if self.interrupts.received is not None:
            return f"stopped by {self.interrupts.received.name}"
        return self.closed

    def _stop(self, where: str, state: TrainState) -> NoReturn:
        """Saves, and ends the run."""
        self._save(state)
        raise TrainingInterrupted(f"{self._wish or 'stopped'} {where}", self.store.last)

    def _figures(self, totals: Tensor, gates: Any) -> dict[str, float]:
        figures = epoch_figures(totals)
        if gates is not None:
            size = self.data.info.size
            macs = count_macs(self.model, size, gates).double().mean().item()
            figures["macs_share"] = macs / dense_macs(self.model, size)
        return figures

    def _check_loss(self, recent: Tensor) -> None:
        """Ends a run whose loss since the last look is beyond hope."""
        figures = epoch_figures(recent)
        loss, task = figures["loss"], figures["task_loss"]
        if not math.isfinite(loss) or task > self.config.train.loss_limit:
            self._diverged(f"the loss is {loss:g}")

    def _diverged(self, what: str) -> NoReturn:
        good = self.store.last
        there = f"the last good checkpoint is {good}" if good.exists() else "no checkpoint yet"
        raise TrainingDiverged(f"{what} in epoch {self.state.epoch + 1}; {there}")

    def _save(self, state: TrainState) -> None:
        """Writes the last checkpoint, and then the metrics of the epochs that it has."""
        self._check_weights()
        error: UserError | None = None
        if self.fabric.is_global_zero:
            state = dataclasses.replace(state, metrics=tuple(self.unsaved))
            path, model, info = self.store.last, self.model, self.data.info
            try:
                save_checkpoint(path, model, self.config, info, state, optimizer=self.optimizer)
                if self.log is not None:
                    self.log.write(self.unsaved)
            except UserError as caught:
                error = caught
        if any_process(error is not None, self.fabric.device):
            raise error or UserError("the first process could not write a checkpoint")
        self.unsaved.clear()
        self.saved_at = time.monotonic()

    def _check_weights(self) -> None:
        try:
            self.model.check_finite()
        except UserError as error:
            self._diverged(str(error))

    def _evaluate(self, trained: TrainState | None = None) -> Result:
        """Evaluates; where a signal comes meanwhile, saves the epoch as trained, and stops."""
        self._check_weights()
        try:
            with self.fabric.autocast():
                images = self.data.evaluation
                batches = images if trained is None else UntilStopped(images, self._check_wish)
                return evaluate_on(self.model, self.data.info, batches, self.data.evaluation_name)
        except Stopped:
            assert trained is not None
            self._stop(f"while epoch {trained.epoch + 1} was evaluated", trained)

    def _check_wish(self) -> None:
        if self._wish is not None and process_count() == 1:
            raise Stopped  # several would have to agree on it: they stop in the next epoch

    def _learn_codebook(self, codes: int) -> RouteCodebook:
        def learn() -> RouteCodebook:
            size, seed = self.data.info.size, self.config.train.seed
            with self.fabric.autocast():  # as in the steps to come
                return learn_codebook(self.model, self.data.calibration, codes, size, seed).cpu()

        # By one process: others may see images of their own, and find another number of codes.
        return from_first_process(learn).to(self.fabric.device)


def set_stage(model: DeepMoE, stage: TrainingStage) -> None:
    """Training mode; what is frozen or fixed neither learns nor tracks statistics."""
    model.train()
    for module in model.routing_modules():
        module.requires_grad_(not stage.frozen)
        module.train(not stage.frozen)
    if stage.by_turns:
        model.network.requires_grad_(stage.frozen)
        model.network.train(stage.frozen)


def takes_turns(model: DeepMoE) -> bool:
    """Whether what makes the gates learns while the base network is fixed, and the other way."""
    return isinstance(model.heads, PruningAgent)
