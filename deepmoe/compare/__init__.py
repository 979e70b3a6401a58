"""The methods that gated networks are compared with: one file each, one interface."""

from deepmoe.compare.selectors import SELECTORS
from deepmoe.compare.task import Choice, PruningTask, Select

__all__ = ["SELECTORS", "Choice", "PruningTask", "Select"]
