"""The verb `paper`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepmoe.cli.common import as_typed, json_option, parse_numbers, set_option
from deepmoe.cli.examples import example
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.paper import Finished, Workshop

ALL, LIST = "all", "list"


@click.command(**example("deepmoe paper all --scale smoke"))
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--scale", default="short", show_default=True, help="full, short or smoke.")
@set_option
@click.option("--seeds", help="Seeds of all runs, with commas. [default: the scale's]")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Runs at once.")
@click.option("--ray", metavar="ADDRESS", help="Train on this Ray cluster, not here.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder. [default: runs/paper/SCALE]")
@click.option("--dry-run", is_flag=True, help="List the runs and their epochs; train nothing.")
@click.option("--no-train", is_flag=True, help="Train nothing; make tables of finished runs.")
@json_option
def paper(
    names: tuple[str, ...],
    scale: str,
    overrides: tuple[str, ...],
    seeds: str | None,
    jobs: int,
    ray: str | None,
    out: Path | None,
    dry_run: bool,
    no_train: bool,
    as_json: bool,
) -> None:
    """Reproduce tables and figures of the paper.

    Our results are put beside the paper's. NAME is a table or figure, or all. Without a name, they
    are listed with the data and time that each needs. The full scale is the paper's schedule; short
    takes minutes for each name on one H200 with --jobs 10; smoke is a trial on made-up data.

    Names share their runs, and finished runs are not repeated: run the command again to continue.
    Each name writes OUT/NAME.md, .png and .json.
    """
    from deepmoe.extras import require

    require("report", "matplotlib")
    from deepmoe.paper import PAGES, Workshop, page_named, scale_named

    asked = scale_named(scale)
    if names in ((), (LIST,)):
        _list(as_json)
        return
    if len(names) > 1 and not {ALL, LIST}.isdisjoint(names):
        raise UserError(f"give {ALL} or {LIST} alone, without other names")
    every = names == (ALL,)
    pages = list(PAGES.values()) if every else [page_named(n) for n in dict.fromkeys(names)]
    numbers = None if seeds is None else tuple(dict.fromkeys(parse_numbers("--seeds", seeds, int)))
    if numbers is not None and min(numbers) < 0:
        raise UserError(f"--seeds are whole numbers from 0 on, not {seeds}")
    workshop = Workshop(
        pages,
        asked,
        out or Path("runs", "paper", asked.name),
        overrides,
        seeds=numbers,
        leave_out=every,
        look=not dry_run,
        train=dry_run or not no_train,
    )
    if dry_run:
        _print_plan(workshop, as_json)
        return
    own = "" if seeds is None else f" --seeds {seeds}"
    command = f"deepmoe paper {' '.join(names)} --scale {scale}{own}{as_typed(overrides)}"
    if not no_train:
        workshop.train(command=command, jobs=jobs, ray=ray)
    finished, failed = _finish(workshop, command)
    if as_json:
        say(json.dumps({done.page.name: done.values for done in finished}, indent=2))
    else:
        for done in finished:
            _print(done)
        if finished:
            say(f"next: {_next(names, scale, finished[-1])}")
    lacking = [done.page.name for done in finished if not done.complete]
    if lacking:
        why = "are not finished" if no_train else "have no result; their logs say why"
        failed.append(f"some runs of {', '.join(lacking)} {why}")
    if failed:
        raise UserError("; ".join(failed))


def _finish(workshop: "Workshop", command: str) -> tuple[list["Finished"], list[str]]:
    """The pages, and why some can't be made: the others are all the same."""
    finished, failed = [], []
    for name in workshop.pages:
        try:
            finished.append(workshop.finish(name, command=command))
        except UserError as error:
            failed.append(f"{name}: {error}")
    return finished, failed


def _print(done: "Finished") -> None:
    say(f"{done.page.name}: {done.page.title}")
    for number, table in enumerate(done.tables):
        if number:
            say(table.title)
        print_table(table.header, table.cells)
    if done.values["shortened"]:
        say(f"Shortened: {done.values['shortened']}.")
    for note in done.page.notes:
        say(note)
    say(f"table: {done.path}; plot: {done.path.with_suffix('.png')}")
    say()


def _next(names: tuple[str, ...], scale: str, done: "Finished") -> str:
    if scale == "smoke":
        return f"deepmoe paper {' '.join(names)} --scale short --set data.root=PATH"
    return "deepmoe paper" if done.checkpoint is None else f"deepmoe analyze {done.checkpoint}"


def _print_plan(workshop: "Workshop", as_json: bool) -> None:
    from deepmoe.sweep import read_results

    done, left = read_results(workshop.results), workshop.to_train()
    waiting = {run.name for run in left}
    runs = [
        {
            "run": run.name,
            "epochs": run.config.train.total_epochs,
            "batch size": run.config.train.batch_size,
            "after": list(dict.fromkeys(run.needs)),
            "done": run.name in done,
            "to train": run.name in waiting,
        }
        for run in workshop.plan.grid(1).in_order
    ]
    if as_json:
        say(json.dumps(runs, indent=2))
        return
    header = ("run", "epochs", "batch size", "after", "done", "to train")
    print_table(header, [[_short(line[key]) for key in header] for line in runs])
    again = len(waiting & done.keys())
    epochs = sum(workshop.epochs_left(run) for run in left)
    say(f"{len(left)} of {len(runs)} runs to train, {epochs:,} epochs in all")
    if again:
        them = "them is" if again == 1 else "them are"
        say(f"{again} of {them} done, but others start or learn from weights that are gone")


def _short(value: object) -> str:
    if isinstance(value, list):
        return f"{value[0]} and {len(value) - 1} more" if len(value) > 1 else "".join(value)
    return ("yes" if value else "") if isinstance(value, bool) else str(value)


def _list(as_json: bool) -> None:
    from deepmoe.paper import PAGES, SCALES
    from deepmoe.paper.scales import SHORT
    from deepmoe.paper.sources import SOURCES

    if as_json:
        listed = [
            {
                "name": page.name,
                "title": page.title,
                "needs": [f"{SOURCES[d].title}: {SOURCES[d].layout}" for d in page.data],
                "takes": dict(page.takes),
                "shortened": page.shortened_at(SCALES[SHORT]),
            }
            for page in PAGES.values()
        ]
        say(json.dumps(listed, indent=2))
        return
    header = ("name", "shows", "needs", *(f"{scale} takes" for scale in SCALES))
    print_table(
        header,
        [
            (
                page.name,
                page.title,
                " and ".join(SOURCES[d].title for d in page.data),
                *(page.takes[scale] for scale in SCALES),
            )
            for page in PAGES.values()
        ],
    )
    say("Times are estimates for one H200 with --jobs 10; smoke: for one CPU core.")
    say("Scales are chosen by --scale; short is the default.")
    say("Data is read from the folder data, or from --set data.root=PATH; smoke makes up its own.")
    for source in SOURCES.values():
        say(f"{source.title}: {source.layout}")
    say("next: deepmoe paper all --scale smoke")
