"""The methods that gated networks are compared with: one file each, one interface."""

from deepmoe.compare.method import Cell, Method, Step
from deepmoe.compare.methods import METHODS, SELECTORS, method_named
from deepmoe.compare.task import Choice, Epochs, PruningTask, Select

__all__ = [
    "METHODS",
    "SELECTORS",
    "Cell",
    "Choice",
    "Epochs",
    "Method",
    "PruningTask",
    "Select",
    "Step",
    "method_named",
]
