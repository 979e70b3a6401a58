"""From records of a run to tables, plots and pages. Never touches a model."""

from deepmoe.extras import require

require("report", "matplotlib", "jinja2")

from deepmoe.analysis.contenders import Contender, comparison  # noqa: E402
from deepmoe.analysis.report import write_analysis, write_report  # noqa: E402
from deepmoe.analysis.section import Subject  # noqa: E402
from deepmoe.analysis.statistics import activity_by_class  # noqa: E402

__all__ = [
    "Contender",
    "Subject",
    "activity_by_class",
    "comparison",
    "write_analysis",
    "write_report",
]
