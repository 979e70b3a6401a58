"""From records of a run to tables, plots and a report. Never touches a model."""

from deepmoe.analysis.report import Contender, write_report
from deepmoe.analysis.statistics import activity_by_class

__all__ = ["Contender", "activity_by_class", "write_report"]
