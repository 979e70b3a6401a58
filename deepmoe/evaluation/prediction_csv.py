"""Predictions as a table for spreadsheets."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

# What a spreadsheet would take for a formula, and run.
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
START = b"image,label,"  # of such a table
COSTS = ("macs", "dense_macs", "active", "answered_by", "ms", "error")


def predictions_csv(answers: Sequence[Mapping[str, Any]]) -> str:
    """One line an image, with a header; images that could not be judged have their error.

    Names of files and classes are data, whatever they begin with: one that a spreadsheet would take
    for a formula has an apostrophe before it, which spreadsheets don't show.

    Args:
        answers: of `predict`, as plain values (`as_dict()`).
    """
    share = "share" if any("size" in answer for answer in answers) else "probability"
    most = max((len(answer.get("top", ())) for answer in answers), default=0)
    places = ["", *(f"_{place}" for place in range(2, most + 1))]
    header = ["image", *(f"{name}{place}" for place in places for name in ("label", share))]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*header, *COSTS], restval="")
    writer.writeheader()
    for answer in answers:
        row = {key: answer[key] for key in ("image", *COSTS) if key in answer}
        for place, guess in zip(places, answer.get("top", ()), strict=False):
            row |= {f"{name}{place}": value for name, value in guess.items()}
        writer.writerow({key: _as_data(value) for key, value in row.items()})
    return text.getvalue()


def _as_data(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value
