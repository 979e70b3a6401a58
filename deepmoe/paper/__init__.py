"""The paper's tables and figures by name: ours beside theirs, at the scale a machine allows."""

from deepmoe.paper.names import PAGES, page_named
from deepmoe.paper.runner import Finished, Workshop
from deepmoe.paper.scales import SCALES, scale_named

__all__ = ["PAGES", "SCALES", "Finished", "Workshop", "page_named", "scale_named"]
