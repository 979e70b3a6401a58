"""Names that people can read."""

import re
from collections.abc import Sequence
from pathlib import Path

from deepmoe.config import DataConfig
from deepmoe.console import printable

UNITS = ("B", "KB", "MB", "GB")
MOST_CHARACTERS = 28  # of a name in a plot
_RESIDUAL = re.compile(r"layer(\d+)\.(\d+)\.conv(\d+)")
_SEQUENTIAL = re.compile(r"features\.\d+")


def readable_layers(names: Sequence[str]) -> list[str]:
    """Layers as a reader of papers would call them; names of other networks stay as they are."""
    if names and all(_SEQUENTIAL.fullmatch(name) for name in names):
        return [f"conv {number}" for number in range(1, len(names) + 1)]
    return [_readable(name) for name in names]


def readable_data(config: DataConfig) -> str:
    """What a data set is called: by its name, or its folder's where the name says a layout only."""
    layouts = ("image-folder", "segmentation-pairs")
    return Path(config.root).stem or config.name if config.name in layouts else config.name


def _readable(name: str) -> str:
    found = _RESIDUAL.fullmatch(name)
    if found is None:
        return printable(name)
    stage, block, conv = map(int, found.groups())
    return f"stage {stage}, block {block + 1}, conv {conv}"


def in_plot(name: str) -> str:
    """A name that may hold anything, for matplotlib: short, and never taken for a formula."""
    text = printable(name)
    if len(text) > MOST_CHARACTERS:
        text = text[: MOST_CHARACTERS - 3] + "..."
    return text.replace("$", r"\$")


def file_size(count: float) -> str:
    """Bytes for people."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    digits = 0 if not unit else 2 if count < 10 else 1
    return f"{count:.{digits}f} {UNITS[unit]}"
