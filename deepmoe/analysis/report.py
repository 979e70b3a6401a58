"""Files for people: the report, which is one page, and the analysis, which is a folder."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepmoe.analysis.page import GENERATOR, mask_png, picture_png, render_page
from deepmoe.analysis.plots import drawn
from deepmoe.analysis.section import Section, Subject
from deepmoe.analysis.sections import all_sections
from deepmoe.errors import UserError
from deepmoe.evaluation.findings import Findings
from deepmoe.files import check_writable, write_atomically, write_together

PAGE_NAME, VALUES_NAME = "index.html", "analysis.json"
MARK = f'<meta name="generator" content="{GENERATOR}">'.encode()


def check_page(path: Path) -> None:
    """Refuses a place for a page that can't be written, or that holds something else.

    Raises:
        UserError: before anything has been measured.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: --out takes a file, such as report.html")
    if path.exists() and not (path.is_file() and MARK in _start(path)):
        raise UserError(f"{path} already exists and is not a deepmoe report: choose another --out")
    check_writable(path)


def _start(path: Path) -> bytes:
    """Where a page tells what it is; the rest of a file may be of any length."""
    with path.open("rb") as file:
        return file.read(2000)


def check_folder(folder: Path) -> None:
    """Refuses a folder for an analysis that can't be written, or that holds something else.

    Raises:
        UserError: before anything has been measured.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: --out takes a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / VALUES_NAME).is_file():
        raise UserError(f"{folder} holds other files: choose another --out")
    check_writable(folder / PAGE_NAME)


def write_report(path: Path, found: Findings, subject: Subject) -> None:
    """Writes the page; an earlier one is replaced."""
    write_atomically(path, render_page(found, subject))


def write_analysis(
    folder: Path, found: Findings, subject: Subject, values: Mapping[str, Any]
) -> list[str]:
    """Writes the page, its plots and pictures as PNG, and what was found out as JSON.

    Args:
        folder: is made if it is not there.
        found: of the model.
        subject: what it is.
        values: for the JSON file.

    Returns:
        The names of the files.
    """
    sections = all_sections(found, subject, deep=True)
    files = {**_plots(sections), **_images(found)}
    values = {**values, "files": [*files, PAGE_NAME]}
    files[VALUES_NAME] = (json.dumps(values, indent=2) + "\n").encode()
    files[PAGE_NAME] = render_page(found, subject, sections)
    before = _written_before(folder)
    write_together(folder, files)
    for path in before:
        if path.name not in files:
            path.unlink(missing_ok=True)
    return list(files)


def _written_before(folder: Path) -> list[Path]:
    """Plots and pictures of an earlier analysis, which a new one does not always replace."""
    try:
        names = json.loads((folder / VALUES_NAME).read_bytes())["files"]
        return [folder / name for name in names if re.fullmatch(r"\w+\.png", name)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _plots(sections: Sequence[Section]) -> dict[str, bytes]:
    figures = {name: figure for s in sections for name, (figure, _) in s.figures.items()}
    return {f"{name}.png": drawn(figure, "png") for name, figure in figures.items()}


def _images(found: Findings) -> dict[str, bytes]:
    files, classes = {}, len(found.record.class_names)
    for kind, pictures in (("cheapest", found.cheapest), ("dearest", found.dearest)):
        for place, picture in enumerate(pictures, 1):
            files[f"{kind}_{place}.png"] = picture_png(picture)
            if picture.mask is not None:
                files[f"{kind}_{place}_mask.png"] = mask_png(picture.mask, classes)
    return files
