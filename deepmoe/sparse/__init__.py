"""The sparse engine: skipped channels become saved time."""

from deepmoe.sparse.model import SparseModel, sparsify
from deepmoe.sparse.planner import Plan

__all__ = ["Plan", "SparseModel", "sparsify"]
