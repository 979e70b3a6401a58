"""The training loop: stages, epochs, batches; checkpoints, interruption and divergence."""

import math
import time
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from deepmoe.config import RunConfig
from deepmoe.costs import count_costs, count_macs
from deepmoe.data import DataSource, derive_seed
from deepmoe.data.segmentation_files import VOID
from deepmoe.errors import TrainingDiverged, TrainingInterrupted, UserError
from deepmoe.layers import RouteCodebook
from deepmoe.losses import DeepMoELoss, LossParts
from deepmoe.model import DeepMoE
from deepmoe.registry import model_from_config
from deepmoe.training.budget import MacsBudget
from deepmoe.training.checkpoint import CheckpointStore, save_checkpoint
from deepmoe.training.codes import check_codes, learn_codebook
from deepmoe.training.distributed import (
    any_process,
    copy_from_first,
    made_by_first,
    sum_over_processes,
)
from deepmoe.training.evaluate import EvalResult, evaluate
from deepmoe.training.interrupts import Interrupts
from deepmoe.training.log import RunLog
from deepmoe.training.schedules import Stage, learning_rate, stages
from deepmoe.training.segmentation import SegmentationResult, evaluate_segmentation
from deepmoe.training.state import TrainState
from deepmoe.training.step import EagerStep, GraphedStep, Objective, Teacher

Result = EvalResult | SegmentationResult
LOOK_EVERY = 20  # batches between looks at figures, which wait for the device


class Trainer:
    """Trains a model through both stages, from wherever its state stands.

    Args:
        config: of the run.
        fabric: launched; moves, wraps and differentiates.
        model: on Fabric's device.
        optimizer: of the model's parameters.
        data: loaders to train and to evaluate with.
        store: of checkpoints.
        log: of metrics; `None` in all processes but one.
        state: how far the run is.
        teacher: whose outputs are learnt from, if there is one.
    """

    def __init__(
        self,
        config: RunConfig,
        fabric: Fabric,
        model: DeepMoE,
        optimizer: torch.optim.Optimizer,
        data: DataSource,
        store: CheckpointStore,
        log: RunLog | None,
        state: TrainState,
        teacher: Teacher | None = None,
    ) -> None:
        self.config = config
        self.fabric = fabric
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.store = store
        self.log = log
        self.state = state
        self.teacher = teacher
        self.interrupts = Interrupts()
        self.budget = self._make_budget()
        codes = config.train.codes
        if codes is not None:  # a mistake is told now, not when they are learnt hours later
            made_by_first(fabric, lambda: check_codes(codes, data.calibration.images))
        self.saved_at = time.monotonic()
        self.result: Result | None = None
        self.looked_at = torch.zeros(0)  # the sums at the last look

    def run(self) -> Result:
        """Trains to the end; returns the last evaluation."""
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
            self._meet_budget()
        for stage in stages(self.config.train):
            if self.state.epoch >= stage.end:
                continue
            codes = self.config.train.codes
            if stage.frozen and codes is not None and self.model.codebook is None:
                self.model.codebook = self._learn_codebook(codes)
            step = self.prepare(stage)
            for epoch in range(max(self.state.epoch, stage.start), stage.end):
                self._run_epoch(step, stage, epoch)

    def prepare(self, stage: Stage) -> EagerStep:
        """A stage's training step: frozen where it is, compiled and captured where that pays."""
        set_stage(self.model, stage)
        train, on_cuda = self.config.train, self.fabric.device.type == "cuda"
        # What makes the joint stage harder ends with it: norms are to know whole images and routes.
        noise = (0.0, 0.0) if stage.frozen else (self.config.data.mixup, train.random_threshold)
        objective = Objective(self.model, self._loss(stage), self.teacher, *noise)
        if train.compile == "on" or (train.compile == "auto" and on_cuda):
            objective.compile(dynamic=False)
        wrapped, optimizer = self.fabric.setup(objective, self.optimizer)
        graphs = train.cuda_graphs == "auto" and on_cuda and self.fabric.world_size == 1
        return (GraphedStep if graphs else EagerStep)(wrapped, optimizer, self.fabric)

    def _run_epoch(self, step: EagerStep, stage: Stage, epoch: int) -> None:
        start, train = time.perf_counter(), self.config.train
        sums = self.train_epoch(step, stage, epoch)
        losses = epoch_figures(sum_over_processes(self.fabric, sums))
        skipped = torch.tensor(float(self.data.train.skipped), device=self.fabric.device)
        skipped = sum_over_processes(self.fabric, skipped)
        if epoch + 1 == train.epochs:
            self._meet_budget()
        last = epoch + 1 == train.total_epochs
        self.result = None
        is_best = False
        if (epoch + 1) % train.evaluate_epochs == 0 or last:
            self.result = self._evaluate()
            is_best = self.state.best is None or self.result.accuracy > self.state.best
        best = self.result.accuracy if self.result and is_best else self.state.best
        self.state = TrainState(epoch=epoch + 1, best=best)
        if self.log is not None:
            metrics = {
                "epoch": epoch + 1,
                "stage": stage.name,
                "lr": learning_rate(train, epoch),
                **losses,
                **(_reported(self.result, self.data.evaluation_name) if self.result else {}),
                "skipped_images": int(skipped) + self.data.evaluation.skipped,
                "seconds": round(time.perf_counter() - start, 3),
            }
            self.log.write(metrics, train.total_epochs)
        if (epoch + 1) % train.checkpoint_epochs == 0 or last or is_best:
            self._save()
            if self.fabric.is_global_zero:
                self.store.keep_epoch(epoch + 1, is_best=is_best)

    def train_epoch(self, step: EagerStep, stage: Stage, epoch: int) -> Tensor:
        """Trains from the state's batch on; returns sums of loss parts, hits and labels."""
        set_stage(self.model, stage)
        device, loader, train = self.fabric.device, self.data.train, self.config.train
        loss = self._loss(stage)
        sums = torch.zeros(len(LossParts._fields) + 3, dtype=torch.float64, device=device)
        self.looked_at = sums.clone()
        if self.state.sums and len(self.state.sums) != len(sums):
            raise UserError(
                f"{self.store.last} is from within an epoch of an earlier version; "
                "resume from the checkpoint of a finished epoch"
            )
        if self.state.sums:  # of all processes together, so one goes on with them
            self.looked_at += torch.tensor(self.state.sums, dtype=torch.float64, device=device)
            sums += self.looked_at * self.fabric.is_global_zero
        first = self.state.batch
        for batch, (x_BCHW, labels) in enumerate(loader.epoch(epoch, first), start=first):
            # Noise inside the model depends on seed and batch alone: a resumed run repeats it.
            torch.manual_seed(derive_seed(train.seed, epoch, batch, 1))
            now = epoch + batch / loader.batches_per_epoch
            figures, gates = step(x_BCHW, labels, learning_rate(train, now), *loss.weights(now))
            if self.budget is not None and gates is not None and not stage.frozen:
                self.budget.step(gates, now / train.epochs, self.fabric)
            sums += figures
            self._after_batch(epoch, batch + 1, sums, gates)
        return sums

    def _loss(self, stage: Stage) -> DeepMoELoss:
        ignore = VOID if self.data.info.task == "segmentation" else -100
        return DeepMoELoss.from_config(self.config.loss, frozen=stage.frozen, ignore_index=ignore)

    def _after_batch(self, epoch: int, done: int, sums: Tensor, gates: Any) -> None:
        """What may happen between two batches: a stop, a checkpoint, a look at the figures."""
        look = done % LOOK_EVERY == 0 or done == self.data.train.batches_per_epoch
        stop = self.interrupts.received is not None
        minutes = (time.monotonic() - self.saved_at) / 60
        due = minutes > self.config.train.checkpoint_minutes
        if self.fabric.world_size > 1:
            # Every process must decide alike, so all ask each other at the same batches.
            stop, due = (look and any_process(self.fabric, flag) for flag in (stop, due))
        if look or stop or due:
            totals = sum_over_processes(self.fabric, sums)
            self._check_loss(totals - self.looked_at)
            self.looked_at = totals
        if stop or due:
            self.state = TrainState(epoch, done, tuple(totals.tolist()), self.state.best)
            self._save()
        if stop:
            name = self.interrupts.received.name if self.interrupts.received else "a signal"
            raise TrainingInterrupted(
                f"stopped by {name} after batch {done} of epoch {epoch + 1}; "
                f"{self.store.last} is saved, and --resume goes on from it"
            )
        if self.log is not None:
            figures = self._figures(totals, gates) if look and self.log.watched else None
            at = epoch * self.data.train.batches_per_epoch + done
            self.log.advance(at, figures)

    def _figures(self, totals: Tensor, gates: Any) -> dict[str, float]:
        figures = epoch_figures(totals)
        if gates is not None:
            size = self.data.info.size
            macs = count_macs(self.model, size, gates).double().mean().item()
            figures["macs_share"] = macs / count_costs(self.model, size).macs
        return figures

    def _check_loss(self, recent: Tensor) -> None:
        """Ends a run whose loss since the last look is beyond hope."""
        figures = epoch_figures(recent)
        loss, task = figures["loss"], figures["task_loss"]
        if not math.isfinite(loss) or task > self.config.train.loss_limit:
            self._diverged(f"the loss is {loss:g}")

    def _diverged(self, what: str) -> None:
        good = self.store.last
        there = f"the last good checkpoint is {good}" if good.exists() else "no checkpoint yet"
        raise TrainingDiverged(f"{what} in epoch {self.state.epoch + 1}; {there}")

    def _save(self) -> None:
        finite = torch.stack([p.detach().isfinite().all() for p in self.model.parameters()])
        if not finite.all():
            self._diverged("a weight is not finite")
        error: UserError | None = None
        if self.fabric.is_global_zero:
            try:
                save_checkpoint(
                    self.store.last,
                    self.model,
                    self.config,
                    self.data.info,
                    self.state,
                    optimizer=self.optimizer,
                )
            except UserError as caught:
                error = caught
        if any_process(self.fabric, error is not None):
            raise error or UserError("the first process could not write a checkpoint")
        self.saved_at = time.monotonic()

    def _evaluate(self) -> Result:
        with self.fabric.autocast():
            return evaluate_on(self.model, self.data)

    def _learn_codebook(self, codes: int) -> RouteCodebook:
        def learn() -> RouteCodebook:
            size, seed = self.data.info.size, self.config.train.seed
            with self.fabric.autocast():  # as in the steps to come
                return learn_codebook(self.model, self.data.calibration, codes, size, seed).cpu()

        # By one process: others may see images of their own, and find another number of codes.
        return made_by_first(self.fabric, learn).to(self.fabric.device)

    def _meet_budget(self) -> None:
        """What the joint stage ends with."""
        if self.budget is not None:
            self.budget.calibrate(self.model, self.data.calibration)
            copy_from_first(self.fabric, self.budget.heads.weight)  # each saw images of its own

    def _make_budget(self) -> MacsBudget | None:
        train = self.config.train
        if train.target_macs is None or not self.model.gated:
            return None
        steps = train.epochs * self.data.train.batches_per_epoch
        return MacsBudget(self.model, self.data.info.size, train, steps)


def set_stage(model: DeepMoE, stage: Stage) -> None:
    """Training mode; when frozen, embedding and heads neither learn nor track statistics."""
    model.train()
    for module in model.routing_modules():
        module.requires_grad_(not stage.frozen)
        module.train(not stage.frozen)


def make_model(config: RunConfig, classes: int, device: torch.device) -> DeepMoE:
    """A new model by the run's seed, on its device, in the memory format that is fast there."""
    torch.manual_seed(config.train.seed)
    model = model_from_config(config, classes).to(device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def make_optimizer(model: DeepMoE, config: RunConfig) -> torch.optim.SGD:
    """SGD with momentum. Gate heads get no weight decay: the L1 term is their regulariser."""
    train = config.train
    heads = list(model.heads.parameters()) if model.heads is not None else []
    gate_parameters = {id(p) for p in heads}
    others = [p for p in model.parameters() if id(p) not in gate_parameters]
    decay = {"weight_decay": train.weight_decay, "lr_scale": 1.0}
    groups: list[dict[str, Any]] = [{"params": others, **decay}]
    if heads:
        groups.append({"params": heads, "weight_decay": 0.0, "lr_scale": config.heads.lr_scale})
    return torch.optim.SGD(
        groups,
        lr=train.lr,
        momentum=train.momentum,
        nesterov=train.nesterov,
        fused=others[0].is_cuda,  # one kernel instead of hundreds
    )


def epoch_figures(totals: Tensor) -> dict[str, float]:
    """Means from the sums of the steps' figures."""
    *losses, correct, labels, batches = totals.tolist()
    means = {f: v / max(1.0, batches) for f, v in zip(LossParts._fields, losses, strict=True)}
    return {
        "loss": means["total"],
        "task_loss": means["task"],
        "gate_l1": means["gates"],
        "embedding_loss": means["embedding"],
        "distillation_loss": means["distillation"],
        "train_accuracy": correct / max(1.0, labels),
    }


def evaluate_on(model: DeepMoE, data: DataSource) -> Result:
    """Evaluates by the measure of the data's task."""
    if data.info.task == "segmentation":
        return evaluate_segmentation(model, data.evaluation, data.info.class_names)
    return evaluate(model, data.evaluation)


def _reported(result: Result, evaluated_on: str) -> dict[str, Any]:
    values = result.as_dict()
    values["evaluation_loss"] = values.pop("loss")
    return {
        **values,
        "accuracy": result.accuracy,
        "embedding_accuracy": result.embedding_accuracy,
        "evaluated_on": evaluated_on,
    }
