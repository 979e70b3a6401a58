"""The sparse engine: skipped channels become saved time."""

from deepmoe.sparse.model import SparseModel, sparsify

__all__ = ["SparseModel", "sparsify"]
