"""Convolutional networks that spend on each image only what it needs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmoe.bench.benchmark import Benchmark
    from deepmoe.budget import MacsBudget
    from deepmoe.building import gate
    from deepmoe.checking import check
    from deepmoe.checkpoint import load_checkpoint
    from deepmoe.config import RunConfig, load_config
    from deepmoe.costs import count_macs
    from deepmoe.evaluation import Evaluation, Prediction, evaluate, predict, set_exits
    from deepmoe.export import Export
    from deepmoe.losses import DeepMoELoss
    from deepmoe.model import DeepMoE, DeepMoEOutput
    from deepmoe.registry import create_model, list_models, register_model
    from deepmoe.sparse import sparsify
    from deepmoe.training import fit
    from deepmoe.widening import widen

__version__ = "0.1.0"

# Names are imported on first use: `import deepmoe` stays light, whatever the training needs.
_HOMES = {
    "MacsBudget": "deepmoe.budget",
    "check": "deepmoe.checking",
    "RunConfig": "deepmoe.config",
    "load_config": "deepmoe.config",
    "count_macs": "deepmoe.costs",
    "DeepMoELoss": "deepmoe.losses",
    "DeepMoE": "deepmoe.model",
    "DeepMoEOutput": "deepmoe.model",
    "gate": "deepmoe.building",
    "create_model": "deepmoe.registry",
    "list_models": "deepmoe.registry",
    "register_model": "deepmoe.registry",
    "sparsify": "deepmoe.sparse",
    "Benchmark": "deepmoe.bench.benchmark",
    "Evaluation": "deepmoe.evaluation",
    "Export": "deepmoe.export",
    "Prediction": "deepmoe.evaluation",
    "evaluate": "deepmoe.evaluation",
    "predict": "deepmoe.evaluation",
    "set_exits": "deepmoe.evaluation",
    "fit": "deepmoe.training",
    "load_checkpoint": "deepmoe.checkpoint",
    "widen": "deepmoe.widening",
}

__all__ = [
    "Benchmark",
    "DeepMoE",
    "DeepMoELoss",
    "DeepMoEOutput",
    "Evaluation",
    "Export",
    "MacsBudget",
    "Prediction",
    "RunConfig",
    "check",
    "count_macs",
    "create_model",
    "evaluate",
    "fit",
    "gate",
    "list_models",
    "load_checkpoint",
    "load_config",
    "predict",
    "register_model",
    "set_exits",
    "sparsify",
    "widen",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deepmoe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
