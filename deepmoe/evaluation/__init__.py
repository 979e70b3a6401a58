"""What a trained model does: accuracy, scores of segmentation, predictions, costs, curves."""

from dataclasses import replace

from deepmoe.data import DataInfo
from deepmoe.evaluation.accuracy import Evaluation, evaluate
from deepmoe.evaluation.batches import Batches
from deepmoe.evaluation.curve import cost_curve
from deepmoe.evaluation.cut import cut_to
from deepmoe.evaluation.exit_answers import Answers, ExitFigures, collect_answers
from deepmoe.evaluation.exits import exit_certified, exit_for_loss, exit_for_macs, set_exits
from deepmoe.evaluation.gate_record import GateRecord, collect_gates
from deepmoe.evaluation.memory import Memory, measure_memory
from deepmoe.evaluation.narrowing import narrowed_model, used_channels
from deepmoe.evaluation.prediction import Prediction, Unanswered, predict, predict_each
from deepmoe.evaluation.routes import Routes, count_routes
from deepmoe.evaluation.segmentation_prediction import SegmentationPrediction
from deepmoe.evaluation.segmentation_scores import SegmentationEvaluation, evaluate_segmentation
from deepmoe.evaluation.shuffling import Shuffling, shuffle_gates
from deepmoe.model import DeepMoE

__all__ = [
    "Answers",
    "Evaluation",
    "ExitFigures",
    "GateRecord",
    "Memory",
    "Prediction",
    "Routes",
    "SegmentationEvaluation",
    "SegmentationPrediction",
    "Shuffling",
    "Unanswered",
    "collect_answers",
    "collect_gates",
    "cost_curve",
    "count_routes",
    "cut_to",
    "evaluate",
    "evaluate_on",
    "evaluate_segmentation",
    "exit_certified",
    "exit_for_loss",
    "exit_for_macs",
    "measure_memory",
    "narrowed_model",
    "predict",
    "predict_each",
    "set_exits",
    "shuffle_gates",
    "used_channels",
]


def evaluate_on(
    model: DeepMoE, info: DataInfo, batches: Batches, name: str | None = None
) -> Evaluation | SegmentationEvaluation:
    """Evaluates by the measure of the data's task; `name` is what the images are called."""
    if info.task == "segmentation":
        return replace(evaluate_segmentation(model, batches, info.class_names), evaluated_on=name)
    return replace(evaluate(model, batches), evaluated_on=name)
