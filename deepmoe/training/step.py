"""One training step: forward, backward and update, launched one by one or as one CUDA graph."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from deepmoe.cuda_graphs import CapturedCall, run_on
from deepmoe.layers import Gates
from deepmoe.losses import DeepMoELoss, norm_l1
from deepmoe.model import DeepMoE
from deepmoe.training.teachers import Teachers

WARM_UP = 3  # steps before a capture: compilers, cuDNN and the optimiser set themselves up


class StepResult(NamedTuple):
    """What a step leaves: the batch's share of an epoch's sums, and its gates."""

    figures: Tensor
    gates: Gates | None


class Objective(nn.Module):
    """Model, loss and figures of a batch as one module, for compilers to work on.

    Args:
        model: to train.
        loss: the objective.
        teacher: whose outputs the loss compares with; in evaluation mode.
    """

    def __init__(self, model: DeepMoE, loss: DeepMoELoss, teacher: Teachers | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.teacher = teacher

    def forward(
        self,
        sparsity: Tensor,
        embedding_weight: Tensor,
        x_BCHW: Tensor,
        labels: Tensor,
        teacher_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Gates | None]:
        """Returns the loss, the batch's share of an epoch's sums, and the gates.

        The figures are the loss's parts, hits, counted labels and 1.
        """
        output = self.model(x_BCHW)
        if self.teacher is not None:
            teacher_logits = self.teacher(x_BCHW)
        parts = self.loss.weighted(output, labels, sparsity, embedding_weight, teacher_logits)
        if self.loss.norm_sparsity:
            shrinkage = self.loss.norm_sparsity * norm_l1(self.model.network)
            parts = parts._replace(total=parts.total + shrinkage)
        counted = labels != self.loss.ignore_index
        hits = ((output.logits.argmax(dim=1) == labels) & counted).sum()
        ones = torch.ones_like(parts.total)
        figures = torch.stack([p.double() for p in (*parts, hits, counted.sum(), ones)])
        return parts.total, figures.detach(), output.gates


class EagerStep:
    """Trains on a batch, by calls one after the other.

    Args:
        objective: set up by Fabric.
        optimizer: set up by Fabric.
        fabric: differentiates.
    """

    def __init__(self, objective: nn.Module, optimizer: Any, fabric: Fabric) -> None:
        self.objective = objective
        self.optimizer = optimizer
        self.fabric = fabric
        # As tensors on the device: numbers would be compiled, or captured, as constants.
        self.sparsity, self.embedding_weight = torch.zeros(2, device=fabric.device).unbind()

    def __call__(
        self, batch: Sequence[Tensor], rate: float, sparsity: float, embedding_weight: float
    ) -> StepResult:
        """Trains with this learning rate, lambda and mu.

        Args:
            batch: images, labels, and what teachers said of them where that is known already.
            rate: the learning rate.
            sparsity: lambda.
            embedding_weight: mu.
        """
        self.sparsity.fill_(sparsity)
        self.embedding_weight.fill_(embedding_weight)
        self.set_rate(rate)
        return self.run(*batch)

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of all parameters, each group's in its own unit."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]

    def run(self, *batch: Tensor) -> StepResult:
        """Trains with the rate and weights that are set."""
        total, figures, gates = self.forward(*batch)
        self.backward(total)
        self.optimizer.step()
        return StepResult(figures, gates)

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor, Gates | None]:
        """The objective of a batch."""
        return self.objective(self.sparsity, self.embedding_weight, *batch)

    def backward(self, total: Tensor) -> None:
        """Gradients of this batch alone."""
        self.optimizer.zero_grad(set_to_none=True)
        self.fabric.backward(total)


class GraphedStep(EagerStep):
    """Trains on a batch with one launch: small kernels run faster than they can be launched.

    After a few plain steps, the work of one is captured, and replayed for every batch of that
    shape. Results lie in the same memory each time: use them before the next step.
    """

    def __init__(self, objective: nn.Module, optimizer: Any, fabric: Fabric) -> None:
        super().__init__(objective, optimizer, fabric)
        for group in optimizer.param_groups:
            # Steps that take turns share it: each has captured where it lies.
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.zeros((), device=fabric.device)
        self.plain_steps = 0
        self.stream = torch.cuda.Stream()
        self.captured: CapturedCall | None = None

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate * group["lr_scale"])

    def run(self, *batch: Tensor) -> StepResult:
        if self.captured is None and self.plain_steps >= WARM_UP:
            self.captured = CapturedCall(super().run, batch, self.stream, warm_up=False)
        if self.captured is not None and batch[0].shape == self.captured.inputs[0].shape:
            return self.captured(*batch)
        # On the stream of the capture, where autograd then finds what it has set up.
        self.plain_steps += 1
        return run_on(self.stream, super().run, *batch)
