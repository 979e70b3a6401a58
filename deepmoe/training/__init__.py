"""Two-stage training: stages, loop, compute budget, codebooks, resuming."""

from deepmoe.training.budget import MacsBudget
from deepmoe.training.codebook_learning import learn_codebook
from deepmoe.training.fit import FitResult, fit

__all__ = ["FitResult", "MacsBudget", "fit", "learn_codebook"]
