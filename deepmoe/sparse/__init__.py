"""The sparse engine: skipped channels become saved time."""

from deepmoe.sparse.inference import InferenceModel
from deepmoe.sparse.model import SparseModel, sparsify
from deepmoe.sparse.planner import Plan

__all__ = ["InferenceModel", "Plan", "SparseModel", "sparsify"]
