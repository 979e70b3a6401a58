"""The objective: J = CE(base) + lambda * sum_l ||g^l||_1 + mu * CE(embedding), in parts."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.config import LossConfig
from deepmoe.layers.agent import agent_loss
from deepmoe.model import DeepMoEOutput
from deepmoe.ops import at_least_single
from deepmoe.schema import Schedule, value_at


class LossParts(NamedTuple):
    """The weighted total, and each part before its weight."""

    total: Tensor
    task: Tensor
    gates: Tensor
    embedding: Tensor
    balance: Tensor
    distillation: Tensor
    agent: Tensor


class DeepMoELoss:
    """The objective, with weights that may follow a schedule over epochs.

    Args:
        sparsity: lambda, the weight of the gates' L1 norm.
        l1: `sum` over channels, or `mean` over each layer's channels; summed over layers and
            averaged over images either way.
        embedding: mu, the weight of the embedding's own cross-entropy.
        balance: weight of the load-balancing term for noisy top-k heads.
        label_smoothing: of the task's cross-entropy.
        ignore_index: label that does not count, such as 255 in segmentation.
        distillation: share of the task's cross-entropy that gives way to the difference from a
            teacher's outputs.
        temperature: divides the logits of both before they are compared.
        embedding_distillation: as `distillation`, of the embedding's own cross-entropy.
        norm_sparsity: weight of the L1 norm of batch norms' scales, which `norm_l1` gives.
        agent: where an agent makes the gates, it learns, and nothing else does: by which the task's
            loss counts in its reward. `None`: it does not learn.
    """

    def __init__(
        self,
        sparsity: Schedule = 0.0,
        *,
        l1: Literal["sum", "mean"] = "sum",
        embedding: Schedule = 1.0,
        balance: float = 0.0,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        distillation: float = 0.0,
        temperature: float = 4.0,
        embedding_distillation: float = 0.0,
        norm_sparsity: float = 0.0,
        agent: float | None = None,
    ) -> None:
        if l1 not in ("sum", "mean"):
            raise ValueError(f"l1 is sum or mean, not {l1!r}")
        self.sparsity = sparsity
        self.l1 = l1
        self.embedding = embedding
        self.balance = balance
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.distillation = distillation
        self.temperature = temperature
        self.embedding_distillation = embedding_distillation
        self.norm_sparsity = norm_sparsity
        self.agent = agent

    @classmethod
    def from_config(
        cls, config: LossConfig, *, frozen: bool = False, ignore_index: int = -100
    ) -> "DeepMoELoss":
        """The objective of a stage: while embedding and gates are frozen, the task alone."""
        return cls(
            0.0 if frozen else config.sparsity,
            l1=config.l1,
            embedding=0.0 if frozen else config.embedding,
            balance=0.0 if frozen else config.balance,
            label_smoothing=config.label_smoothing,
            ignore_index=ignore_index,
            distillation=config.distillation,
            temperature=config.distillation_temperature,
            embedding_distillation=config.embedding_distillation,
            norm_sparsity=0.0 if frozen else config.norm_sparsity,
            agent=None if frozen else config.agent,
        )

    def weights(self, epoch: float) -> tuple[float, float]:
        """lambda and mu at a (fractional) epoch of the schedules."""
        return value_at(self.sparsity, epoch), value_at(self.embedding, epoch)

    def __call__(self, output: DeepMoEOutput, targets: Tensor, epoch: float = 0.0) -> LossParts:
        """Evaluates the objective for a batch at a (fractional) epoch of the schedules."""
        return self.weighted(output, targets, *self.weights(epoch))

    def weighted(
        self,
        output: DeepMoEOutput,
        targets: Tensor,
        sparsity: float | Tensor,
        embedding_weight: float | Tensor,
        teacher_logits: Tensor | None = None,
    ) -> LossParts:
        """Evaluates the objective with given lambda and mu, which may be tensors.

        Args:
            output: of the model.
            targets: labels of images, or of pixels.
            sparsity: lambda.
            embedding_weight: mu.
            teacher_logits: of the same images, where there is a teacher.
        """
        summed = F.cross_entropy(
            at_least_single(output.logits),
            targets,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        # A batch may hold nothing but ignored pixels: zero then, not NaN.
        counted = targets != self.ignore_index
        task = summed / counted.sum().clamp_min(1)
        none = torch.zeros_like(task)
        gates = balance = embedding = distillation = none
        weighted_task = task
        if teacher_logits is not None:
            difference = distance_from(teacher_logits, output.logits, self.temperature)
            distillation = (difference * counted).sum() / counted.sum().clamp_min(1)
            weighted_task = torch.lerp(task, distillation, self.distillation)
        if output.gates is not None:
            gates = gate_l1(output.gates, self.l1)
            if self.balance:
                balance = load_imbalance(output.gates)
        if output.embedding_logits is not None:
            embedding = _image_cross_entropy(at_least_single(output.embedding_logits), targets)
            whole_images = targets.ndim == 1  # of pixels, an embedding says nothing
            if teacher_logits is not None and self.embedding_distillation and whole_images:
                taught = distance_from(teacher_logits, output.embedding_logits, self.temperature)
                embedding = torch.lerp(embedding, taught.mean(), self.embedding_distillation)
        regular = sparsity * gates + embedding_weight * embedding + self.balance * balance
        total, agent = weighted_task + regular, none
        if output.decisions is not None and self.agent is not None:
            reward_B = -self.agent * self._task_of_images(output.logits.detach(), targets)
            total = agent = agent_loss(output.decisions, reward_B)
        return LossParts(total, task, gates, embedding, balance, distillation, agent)

    def _task_of_images(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The task's cross-entropy of each image; of its pixels' mean in segmentation."""
        each = F.cross_entropy(
            at_least_single(logits), targets, ignore_index=self.ignore_index, reduction="none"
        ).reshape(len(targets), -1)
        counted = (targets != self.ignore_index).reshape(len(targets), -1).sum(dim=1)
        return each.sum(dim=1) / counted.clamp_min(1)


def distance_from(teacher_logits: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence from a teacher's softened outputs, for each image or pixel.

    Times the squared temperature, so that its gradient keeps its size.
    """
    ours, theirs = (
        F.log_softmax(at_least_single(z) / temperature, dim=1) for z in (logits, teacher_logits)
    )
    divergence = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(dim=1)
    return temperature**2 * divergence


def _image_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 1:
        return F.cross_entropy(logits, targets)
    # A segmentation batch has labels of pixels, and none of the image. Zero, but still a function
    # of the logits: DDP waits for a gradient of every parameter.
    return 0.0 * logits.mean()


def norm_l1(network: nn.Module) -> Tensor:
    """The sum of |scale| over all batch norms of a network."""
    norms = (m for m in network.modules() if isinstance(m, nn.BatchNorm2d))
    return torch.stack([at_least_single(n.weight).abs().sum() for n in norms if n.affine]).sum()


def gate_l1(gates: Sequence[Tensor], reduction: Literal["sum", "mean"] = "sum") -> Tensor:
    """sum_l ||g^l||_1 for the average image; `mean` divides each layer by its channels."""
    norms = [at_least_single(g).abs().sum(dim=1).mean() for g in gates]
    if reduction == "mean":
        norms = [norm / max(1, g.shape[1]) for norm, g in zip(norms, gates, strict=True)]
    return torch.stack(norms).sum()


def load_imbalance(gates: Sequence[Tensor]) -> Tensor:
    """Squared coefficient of variation of each expert's total gate, averaged over layers."""
    totals = [at_least_single(g).sum(dim=0) for g in gates if g.shape[1]]
    return torch.stack(
        [t.var(correction=0) / t.mean().square().clamp_min(1e-10) for t in totals]
    ).mean()
