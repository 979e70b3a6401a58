"""Tables and plots of docs/paper.md: the names, and ours beside the paper's where made."""

import json
import re
import tomllib
from typing import Any

from matplotlib.figure import Figure
from result_files import EXPERIMENTS, origin

from deepmoe.costs import format_macs
from deepmoe.paper import PAGES, SCALES
from deepmoe.paper.page import MORE_TRAINING, Made, Shown
from deepmoe.paper.plan import Plan
from deepmoe.paper.scales import FULL
from deepmoe.paper.sources import SOURCES
from deepmoe.paper.tables import run_figures, shown
from deepmoe.results import markdown_table
from deepmoe.sweep import RESULTS_NAME, read_results

FOLDER = "paper"  # of experiments/: NAME.json, as `deepmoe paper NAME` leaves it
FIGURES = ("figure-prune-cifar", "figure-rnp", "figure-shuffle", "figure-width")  # that are drawn
VERDICTS = "verdicts.toml"  # there: what we make of it, by name
CAMVID_FIRST = "camvid_first.jsonl"  # there: runs of CamVid that were trained again since
# A folder of pairs of files has no names for its classes.
CAMVID = (
    *("sky", "building", "pole", "road", "sidewalk", "tree", "sign", "fence", "car"),
    *("pedestrian", "bicyclist"),
)


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


def summary() -> str:
    """The first sentence of what we make of each name."""
    rows = []
    for name, found in _made().items():
        said = re.match(r"\*\*(.+?)\*\*", _verdict(name)[0]) if _verdict(name) else None
        counts = sorted({row["seeds"] for row in found["values"]["rows"] if row["runs"]})
        seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        rows.append((f"[{name}](#{name})", said[1].rstrip(".") if said else "", seeds))
    return markdown_table(["name", "what the short scale shows", "seeds"], rows)


def camvid_twice() -> str:
    """Networks of table-cityscapes that were trained twice with the same seed."""
    before, now = (
        read_results(EXPERIMENTS / FOLDER / name)
        for name in (CAMVID_FIRST, f"short/{RESULTS_NAME}")
    )
    rows = []
    for row in _made()["table-cityscapes"]["values"]["rows"]:
        run = row["runs"][0]
        if run not in before:
            continue
        both = before[run], now[run]
        gated = "DeepMoE" in row["row"]
        rates = (f"{r.settings['heads']['lr_scale']:g}" if gated else "" for r in both)
        figures = [run_figures(result.figures) for result in both]
        ious = (f"{figure['accuracy']:.2f} %" for figure in figures)
        macs = (format_macs(figure["macs"]) for figure in figures)
        rows.append((*row["labels"].values(), *rates, *ious, *macs))
    header = ["network", "method", "gates' rate, first", "again"]
    header += ["mean IoU, first", "again", "MACs, first", "again"]
    lines = [result.line for result in before.values()]
    return f"{markdown_table(header, rows)}\n\n{origin(*lines)}"


def more_results() -> str:
    """The same with all tables of each name."""
    made = _made()
    parts = [f"## {name}\n\n{_section(name, made[name], whole=True)}" for name in made]
    from_there = "\n\n".join(parts).replace(f"](../experiments/{FOLDER}/README.md#", "](#")
    from_there = from_there.replace("](../experiments/", "](../")
    return re.sub(r"\]\((?=[\w-]+\.(md|png|svg))", "](../../docs/", from_there)


def _made() -> dict[str, dict[str, Any]]:
    paths = {name: EXPERIMENTS / FOLDER / f"{name}.json" for name in PAGES}
    there = {name: path for name, path in paths.items() if path.exists()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in there.items()}


def figure(name: str) -> tuple[Figure, str]:
    """The plot of a name, and its table in words."""
    (found,) = [found for made, found in _made().items() if made == name]
    values = found["values"]
    plan = Plan(SCALES[values["scale"]])
    made = Made(plan, EXPERIMENTS, {}, values["measured"], tuple(values["rows"]))
    return PAGES[name].plot(made), "; ".join(", ".join(row) for row in _first(name, values).cells)


def _section(name: str, found: dict[str, Any], *, whole: bool) -> str:
    """Its first table or all, what they show, and where they are from."""
    values, page, first = found["values"], PAGES[name], _first(name, found["values"])
    one_seed = {row[-1] for row in first.cells} == {"1"}  # the last column says how many
    end = -1 if one_seed and not whole else None
    parts = [markdown_table(first.header[:end], [row[:end] for row in first.cells])]
    for table in values["tables"][1:] if whole else ():
        cells = [[_named(cell) for cell in row] for row in table["cells"]]
        parts += [f"{table['title']}:", markdown_table(table["header"], cells)]
    if name in FIGURES:
        parts.append(f"![{page.title}](paper-{name}.svg)")
    notes = [f"Shortened: {values['shortened']}."] if values["shortened"] else []
    notes += [note for note in page.notes if note != MORE_TRAINING]  # the page says it once
    return "\n\n".join([*parts, *_verdict(name), *notes, _origin(found)])


def _first(name: str, values: dict[str, Any]) -> Shown:
    """The first table in today's words."""
    page = PAGES[name]
    return shown(page.title, page.columns, values["rows"], compared=values["scale"] == FULL)


def _named(cell: str) -> str:
    """A class of CamVid by its name."""
    number = cell.removeprefix("class ")
    return CAMVID[int(number)] if number != cell else cell


def _origin(found: dict[str, Any]) -> str:
    """Where its runs are from, which may be of several commits."""
    kept = read_results(EXPERIMENTS / FOLDER / found["values"]["scale"] / RESULTS_NAME)
    names = {name for row in found["values"]["rows"] for name in row["runs"]}
    lines = [{**kept[name].line, "command": found["command"]} for name in names & kept.keys()]
    return origin(*(lines or [found]))


def _verdict(name: str) -> list[str]:
    """What agrees with the paper, what does not, and why we think so."""
    path = EXPERIMENTS / FOLDER / VERDICTS
    written = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return [written[name].strip()] if name in written else []
