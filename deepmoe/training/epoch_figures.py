"""What an epoch is told by: means over its steps, and its evaluation."""

from typing import Any

from torch import Tensor

from deepmoe.evaluation import Evaluation, SegmentationEvaluation
from deepmoe.losses import LossParts

Result = Evaluation | SegmentationEvaluation


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
        "agent_loss": means["agent"],
        "train_accuracy": correct / max(1.0, labels),
        "labels": labels,
    }


def reported(result: Result) -> dict[str, Any]:
    """An evaluation as an epoch's metrics have it."""
    values = result.as_dict()
    values["evaluation_loss"] = values.pop("loss")
    return {
        **values,
        "accuracy": result.accuracy,
        "embedding_accuracy": result.embedding_accuracy,
    }
