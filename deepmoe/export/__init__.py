"""Trained models as files for other runtimes, with the savings in them."""

from deepmoe.export.exporting import export_checkpoint
from deepmoe.export.formats import FORMATS, Format
from deepmoe.export.networks import ROUTES, Route
from deepmoe.export.result import Export

__all__ = ["FORMATS", "ROUTES", "Export", "Format", "Route", "export_checkpoint"]
