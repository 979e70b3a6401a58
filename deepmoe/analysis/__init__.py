"""From records of a run to tables, plots and a report. Never touches a model."""

from deepmoe.extras import require

require("report", "matplotlib", "jinja2")

from deepmoe.analysis.report import Contender, write_report  # noqa: E402
from deepmoe.analysis.statistics import activity_by_class  # noqa: E402

__all__ = ["Contender", "activity_by_class", "write_report"]
