"""The tables of docs/paper.md: the names, and ours beside the paper's where they were made."""

import json
from pathlib import Path

from result_files import EXPERIMENTS, origin

from deepmoe.paper import PAGES, SCALES
from deepmoe.paper.sources import SOURCES
from deepmoe.results import markdown_table

FOLDER = "paper"  # of experiments/: NAME.json, as `deepmoe paper NAME` leaves it


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
    paths = {name: EXPERIMENTS / FOLDER / f"{name}.json" for name in PAGES}
    made = [name for name in PAGES if paths[name].exists()]
    missing = [f"`{name}`" for name in PAGES if name not in made]
    parts = [f"### {name}\n\n{_page_tables(paths[name])}" for name in made]
    if not made:
        parts.append(f"Not made yet: no result of the {len(PAGES)} names is kept here so far.")
    elif missing:
        parts.append(f"Not made yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _page_tables(path: Path) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    values, parts = found["values"], []
    for number, table in enumerate(values["tables"]):
        parts += [f"{table['title']}:"] if number else []
        parts.append(markdown_table(table["header"], table["cells"]))
    notes = [f"Shortened: {values['shortened']}."] if values["shortened"] else []
    return "\n\n".join([*parts, *notes, *values["notes"], origin(found)])
