"""The tables of docs/paper.md: the names, and ours beside the paper's where they were made."""

import json

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


def page_tables(name: str) -> str:
    """What the short scale came to, or a word that it was not made yet."""
    path = EXPERIMENTS / FOLDER / f"{name}.json"
    if not path.exists():
        return f"Not made yet: `deepmoe paper {name}`."
    found = json.loads(path.read_text(encoding="utf-8"))
    values, parts = found["values"], []
    for number, table in enumerate(values["tables"]):
        parts += [f"{table['title']}:"] if number else []
        parts.append(markdown_table(table["header"], table["cells"]))
    notes = [f"Shortened: {values['shortened']}."] if values["shortened"] else []
    return "\n\n".join([*parts, *notes, *values["notes"], origin(found)])
