"""Two-stage training, evaluation and checkpoints."""

from deepmoe.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from deepmoe.training.codes import learn_codebook
from deepmoe.training.evaluate import EvalResult, GateRecord, collect_gates, evaluate
from deepmoe.training.fit import FitResult, fit
from deepmoe.training.predict import Prediction, predict

__all__ = [
    "Checkpoint",
    "EvalResult",
    "FitResult",
    "GateRecord",
    "Prediction",
    "collect_gates",
    "evaluate",
    "fit",
    "learn_codebook",
    "load_checkpoint",
    "predict",
    "save_checkpoint",
]
