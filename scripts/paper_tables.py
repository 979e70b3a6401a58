"""The tables of docs/paper.md: the names, and ours beside the paper's where they were made."""

import json
import re
import tomllib
from dataclasses import asdict
from typing import Any

from result_files import EXPERIMENTS, origin

from deepmoe.paper import PAGES, SCALES
from deepmoe.paper.sources import SOURCES
from deepmoe.paper.tables import shown
from deepmoe.results import markdown_table

FOLDER = "paper"  # of experiments/: NAME.json, as `deepmoe paper NAME` leaves it
VERDICTS = "verdicts.toml"  # there: what we make of it, by name


def names_table() -> str:
    """What there is, what each needs, and how long it takes."""
    rows = [
        (
            f"`{page.name}`",
            page.title,
            ", ".join(SOURCES[data].title for data in page.data),
            *(page.takes[scale] for scale in SCALES),
        )
        for page in PAGES.values()
    ]
    return markdown_table(["name", "shows", "needs", *(f"{scale} takes" for scale in SCALES)], rows)


def results() -> str:
    """What the short scale came to: a section for each name that was made, the others in a line."""
    made = _made()
    parts = [f"### {name}\n\n{_section(name, found, whole=False)}" for name, found in made.items()]
    missing = [f"`{name}`" for name in PAGES if name not in made]
    if not made:
        parts.append(f"Not made yet: no result of the {len(PAGES)} names is kept here so far.")
    elif missing:
        parts.append(f"Not made yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def more_results() -> str:
    """The same with all tables of each name."""
    made = _made()
    parts = [f"## {name}\n\n{_section(name, made[name], whole=True)}" for name in made]
    from_there = "\n\n".join(parts).replace("](../experiments/", "](../")
    return re.sub(r"\]\((?=[\w-]+\.(md|png))", "](../../docs/", from_there)


def _made() -> dict[str, dict[str, Any]]:
    paths = {name: EXPERIMENTS / FOLDER / f"{name}.json" for name in PAGES}
    there = {name: path for name, path in paths.items() if path.exists()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in there.items()}


def _section(name: str, found: dict[str, Any], *, whole: bool) -> str:
    """Its first table or all, what they show, and where they are from."""
    values, page, parts = found["values"], PAGES[name], []
    first = asdict(shown(page.title, page.columns, values["rows"]))  # in today's words
    for number, table in enumerate([first, *values["tables"][1:]] if whole else [first]):
        parts += [f"{table['title']}:"] if number else []
        seen = table if whole else _narrower(table)
        parts.append(markdown_table(seen["header"], seen["cells"]))
    notes = [f"Shortened: {values['shortened']}."] if values["shortened"] else []
    return "\n\n".join([*parts, *_verdict(name), *notes, *page.notes, origin(found)])


def _narrower(table: dict[str, Any]) -> dict[str, Any]:
    """The table without differences, which anybody can take, and without seeds if all have one."""
    header, cells = table["header"], table["cells"]
    one_seed = {row[-1] for row in cells} == {"1"}  # the last column says how many
    places = [
        place
        for place, title in enumerate(header)
        if not title.endswith(", difference") and not (title == "seeds" and one_seed)
    ]
    return {
        "header": [header[place] for place in places],
        "cells": [[row[place] for place in places] for row in cells],
    }


def _verdict(name: str) -> list[str]:
    """What agrees with the paper, what does not, and why we think so."""
    path = EXPERIMENTS / FOLDER / VERDICTS
    written = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return [written[name].strip()] if name in written else []
