"""Two-stage training: stages, loop, codebooks, resuming."""

from deepmoe.extras import require

require("train", "lightning_fabric", "sklearn")

from deepmoe.training.codebook_learning import learn_codebook  # noqa: E402
from deepmoe.training.fit import FitResult, fit  # noqa: E402

__all__ = ["FitResult", "fit", "learn_codebook"]
