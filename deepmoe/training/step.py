"""One training step: forward, backward and update, launched one by one or as one CUDA graph."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from deepmoe.layers import Gates
from deepmoe.losses import DeepMoELoss, LossParts
from deepmoe.model import DeepMoE, DeepMoEOutput, close_small

WARM_UP = 3  # steps before a capture: compilers, cuDNN and the optimiser set themselves up


class StepResult(NamedTuple):
    """What a step leaves: the batch's share of an epoch's sums, and its gates."""

    figures: Tensor
    gates: Gates | None


class Teacher(nn.Module):
    """Trained networks that another one learns from.

    Args:
        networks: one, or several that answer together.
    """

    def __init__(self, networks: Sequence[DeepMoE]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Returns the mean of their logits: the geometric mean of what they hold likely."""
        with torch.no_grad():
            return torch.stack([network(x_BCHW).logits for network in self.networks]).mean(dim=0)


class Objective(nn.Module):
    """Model, loss and figures of a batch as one module, for compilers to work on.

    Args:
        model: to train.
        loss: the objective.
        teacher: whose outputs the loss compares with; in evaluation mode.
        mixup: largest share of another image of the batch that is mixed into each.
        threshold: gates below a random one, up to this, are closed; in units of each layer's
            mean open gate.
    """

    def __init__(
        self,
        model: DeepMoE,
        loss: DeepMoELoss,
        teacher: Teacher | None = None,
        mixup: float = 0.0,
        threshold: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.teacher = teacher
        self.mixup = mixup
        self.threshold = threshold

    def forward(
        self, x_BCHW: Tensor, labels: Tensor, sparsity: Tensor, embedding_weight: Tensor
    ) -> tuple[Tensor, Tensor, Gates | None]:
        """Returns the loss, the batch's share of an epoch's sums, and the gates.

        The figures are the loss's parts, hits, counted labels and 1.
        """
        share = None
        if self.mixup:  # batches come shuffled, so the other end of one is as good as any image
            share = self.mixup * torch.rand((), device=x_BCHW.device, dtype=x_BCHW.dtype)
            x_BCHW = torch.lerp(x_BCHW, x_BCHW.flip(0), share)
        output = self._with_small_gates_closed(x_BCHW) if self.threshold else self.model(x_BCHW)
        teacher_logits = None if self.teacher is None else self.teacher(x_BCHW)
        weights = (sparsity, embedding_weight, teacher_logits)
        parts = self.loss.weighted(output, labels, *weights)
        if share is not None:
            others = self.loss.weighted(output, labels.flip(0), *weights)
            mixed = [torch.lerp(a, b, share) for a, b in zip(parts, others, strict=True)]
            parts = LossParts(*mixed)
        counted = labels != self.loss.ignore_index
        hits = ((output.logits.argmax(dim=1) == labels) & counted).sum()
        ones = torch.ones_like(parts.total)
        figures = torch.stack([p.double() for p in (*parts, hits, counted.sum(), ones)])
        return parts.total, figures.detach(), output.gates

    def _with_small_gates_closed(self, x_BCHW: Tensor) -> DeepMoEOutput:
        gates, embedding_logits = self.model.route(x_BCHW)
        if gates is not None:
            means = [(g.sum() / (g > 0).sum().clamp_min(1)).detach() for g in gates]
            level = self.threshold * torch.rand((), device=x_BCHW.device)
            layers = zip(gates, means, strict=True)
            gates = tuple(close_small(g, level * mean) for g, mean in layers)
        return DeepMoEOutput(self.model.backbone(x_BCHW, gates), embedding_logits, gates)


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
        self, x_BCHW: Tensor, labels: Tensor, rate: float, sparsity: float, embedding_weight: float
    ) -> StepResult:
        """Trains with this learning rate, lambda and mu."""
        self.sparsity.fill_(sparsity)
        self.embedding_weight.fill_(embedding_weight)
        self.set_rate(rate)
        return self.run(x_BCHW, labels)

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of all parameters, each group's in its own unit."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]

    def run(self, x_BCHW: Tensor, labels: Tensor) -> StepResult:
        """Trains with the rate and weights that are set."""
        total, figures, gates = self.forward(x_BCHW, labels)
        self.backward(total)
        self.optimizer.step()
        return StepResult(figures, gates)

    def forward(self, x_BCHW: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Gates | None]:
        """The objective of a batch."""
        return self.objective(x_BCHW, labels, self.sparsity, self.embedding_weight)

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
            group["lr"] = torch.zeros((), device=fabric.device)
        self.plain_steps = 0
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate * group["lr_scale"])

    def run(self, x_BCHW: Tensor, labels: Tensor) -> StepResult:
        if self.graph is None and self.plain_steps >= WARM_UP:
            self._capture(x_BCHW, labels)
        if self.graph is None or x_BCHW.shape != self.x_BCHW.shape:
            return self._run_plainly(x_BCHW, labels)
        self.x_BCHW.copy_(x_BCHW)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.result

    def _run_plainly(self, x_BCHW: Tensor, labels: Tensor) -> StepResult:
        # On the stream of the capture, where autograd then finds what it has set up.
        self.plain_steps += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = super().run(x_BCHW, labels)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _capture(self, x_BCHW: Tensor, labels: Tensor) -> None:
        self.x_BCHW, self.labels = x_BCHW.clone(), labels.clone()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of data loaders, may go on meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.result = super().run(self.x_BCHW, self.labels)
        self.graph = graph
