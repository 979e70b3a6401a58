"""From names to tables: trains what is missing, measures, and writes table, plot and JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepmoe.analysis.plots import drawn
from deepmoe.checkpoint import read_info, read_progress
from deepmoe.console import complain
from deepmoe.devices import choose_device
from deepmoe.errors import UserError
from deepmoe.files import check_writable, write_together
from deepmoe.paper.measured import kept
from deepmoe.paper.page import Line, Made, Page, Row, Shown
from deepmoe.paper.plan import Plan
from deepmoe.paper.scales import FULL, SHORT, Scale
from deepmoe.paper.smoke_data import make_smoke_data
from deepmoe.paper.tables import line_of, run_figures, shown
from deepmoe.results import markdown_table, with_origin
from deepmoe.sweep import (
    RESULTS_NAME,
    Run,
    RunResult,
    check_settings,
    read_results,
    sweep,
    to_train,
)
from deepmoe.sweep.schedule import Job
from deepmoe.sweep.steps import Following, last_checkpoint

DATA_NAME, RUNS_NAME = "data", "runs"
# Settings that change where and how fast runs are trained, and nothing that a table is about.
_NO_MATTER = ("data.root", "data.workers", "train.compile", "train.cuda_graphs", "train.device")


@dataclass(frozen=True)
class Finished:
    """A page that was made.

    Attributes:
        page: what it is.
        tables: as people read them; the first one is ours beside the paper's.
        values: as they are written.
        complete: whether all of its runs have a result.
        path: of the table; plot and JSON lie beside it.
        checkpoint: of the last network in it, if any is there.
    """

    page: Page
    tables: tuple[Shown, ...]
    values: dict[str, Any]
    complete: bool
    path: Path
    checkpoint: Path | None


class Workshop:
    """Where tables and figures of a scale are made.

    Args:
        pages: to be made.
        scale: how much is spent on them.
        out: folder of all that is made. Runs that are there already are not repeated.
        overrides: settings of all runs, as for `--set`.
        seeds: of all rows; as the scale says if not given.
        leave_out: whether pages without their data are left out, with a word on it.
        look: whether to look for the data; without, nothing can be trained or written.
        train: whether runs may be trained; if not, some have to be finished.

    Raises:
        UserError: for data that is not there, settings that can't be, or a folder with runs of
            other settings.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        scale: Scale,
        out: Path,
        overrides: Sequence[str] = (),
        *,
        seeds: Sequence[int] | None = None,
        leave_out: bool = False,
        look: bool = True,
        train: bool = True,
    ) -> None:
        self.out, self.scale, self.overrides = out, scale, tuple(overrides)
        self.seeds = seeds
        if look:
            check_writable(out / RUNS_NAME)
        made_up = out / DATA_NAME if scale.thin else None
        self.plan = Plan(scale, overrides, None if made_up is None else str(made_up), seeds)
        for data in dict.fromkeys(data for page in pages for data in page.data):
            self.plan.data_config(data)  # tells of settings that can't be, before anything is made
        done = read_results(self.results)
        if not train:
            self._check_finished(done.keys())
        if look and made_up is not None and self.plan.root == str(made_up):
            make_smoke_data(made_up)
        if look:
            pages = self._with_data(pages, leave_out)
        self.pages: dict[str, tuple[Page, tuple[Row, ...]]] = {
            page.name: (page, tuple(page.rows(self.plan))) for page in pages
        }
        check_settings(self.plan.grid(1), self.runs, self.results)
        if look:
            self._check_data(done)
        if not train:
            self._check_finished(done.keys() & self.plan.runs.keys())

    @property
    def runs(self) -> Path:
        """Folder of the runs' own folders."""
        return self.out / RUNS_NAME

    @property
    def results(self) -> Path:
        """File of one line a run."""
        return self.out / RESULTS_NAME

    def to_train(self) -> list[Run]:
        """What `train` would train, as things are now."""
        return to_train(self.plan.grid(1), self.runs.resolve(), self.results)

    def epochs_left(self, run: Run) -> int:
        """That are still to be trained, from the run's last checkpoint on."""
        path, epochs = last_checkpoint(self.runs, run.name), run.config.train.total_epochs
        return epochs - read_progress(path)[1].epoch if path.exists() else epochs

    def train(self, *, command: str, jobs: int = 1, ray: str | None = None) -> None:
        """Trains what has no result yet; thin networks in this process, unless several at once.

        Pages are made as soon as their runs have ended: what is stopped leaves those.
        """
        grid = self.plan.grid(jobs)
        if ray is None:
            for device in {run.config.train.device for run in grid.runs}:
                choose_device(device)  # tells of one that is not there, before a run fails
        here = self.scale.thin and jobs == 1 and ray is None
        with _one_thread() if here else nullcontext():
            sweep(
                grid,
                self.runs,
                self.results,
                command=command,
                jobs=jobs,
                ray=ray,
                here=here,
                afterwards=() if here else self._making_pages(command),
            )

    def _check_data(self, done: Mapping[str, RunResult]) -> None:
        """Refuses a folder whose runs know other images than those that are there now.

        Folders of images differ in nothing that checkpoints tell where their classes are the same,
        but in how many images there are to evaluate on.
        """
        for run, data in self.plan.data_of.items():
            path = last_checkpoint(self.runs, run)
            other = path.exists() and read_info(path) != self.plan.open(data)
            if run in done and not done[run].figures.get("skipped_images"):
                other |= done[run].figures.get("images") not in (None, self.plan.images(data))
            if other:
                raise UserError(
                    f"{path.parent} was trained on other images than those in "
                    f"{self.plan.root}: give another --out"
                )

    def _check_finished(self, runs: Set[str]) -> None:
        """Refuses a folder that no page can be made of."""
        if not runs:
            raise UserError(f"{self.out} holds no finished run of these: leave out --no-train")

    def _making_pages(self, command: str) -> list[Following]:
        """Of pages with runs that are to be trained, or that were stopped before they were made.

        `finish` makes them all; where nothing is to be trained, at once.
        """
        done = read_results(self.results).keys()
        if not self.plan.runs.keys() - done:
            return []
        runs = {
            name: {r for row in rows for r in row.runs} for name, (_, rows) in self.pages.items()
        }
        return [
            self._making(name, needs, command)
            for name, needs in runs.items()
            if needs - done or not (self.out / f"{name}.md").exists()
        ]

    def _making(self, name: str, runs: set[str], command: str) -> Following:
        """The step that makes a page, in a process of its own."""
        scale, out = ("--scale", self.scale.name), ("--out", str(self.out.resolve()))
        settings = [part for item in self.overrides for part in ("--set", item)]
        seeds = [] if self.seeds is None else ["--seeds", ",".join(map(str, self.seeds))]
        typed = ("paper", name, "--no-train", *scale, *out, *settings, *seeds)
        device = next(iter(self.plan.runs.values())).config.train.device
        log = self.runs.resolve() / f"{name}.log"

        def job() -> Job:
            return Job(
                f"{name}, making", typed, log, device, partial(self.finish, name, command=command)
            )

        return Following(f"{name}, making", runs, job)

    def finish(self, name: str, *, command: str) -> Finished:
        """Measures what a page's runs have left, and writes its table, plot and JSON."""
        page, rows = self.pages[name]
        results, wanted = read_results(self.results), {run for row in rows for run in row.runs}
        done = {run: results[run] for run in wanted if run in results}
        if not done:  # a table of nothing would stand in a good one's place
            raise UserError("none of its runs has a result")
        made = Made(self.plan, self.runs, done)
        measured: dict[str, Line] = {}
        if page.measure is not None:
            measured = {run: self._measured(page, made, run) for run in sorted(done)}
        lines = tuple(line_of(row, _figures(row, done, measured)) for row in rows)
        made = Made(self.plan, self.runs, done, measured, lines)
        others = () if page.more is None else tuple(page.more(made))
        compared = self.scale.name == FULL
        tables = (shown(page.title, page.columns, lines, compared=compared), *others)
        values = {
            "name": page.name,
            "title": page.title,
            "scale": self.scale.name,
            "shortened": self._shortened(page),
            "notes": list(page.notes),
            "trained_on": sorted({result.line["hardware"] for result in done.values()}),
            "tables": [asdict(table) for table in tables],
            "rows": list(lines),
            "measured": measured,
        }
        complete = len(done) == len(wanted)
        trained = [made.checkpoint(run) for row in rows for run in row.runs if run in done]
        last = next((path for path in reversed(trained) if path.exists()), None)
        finished = Finished(page, tables, values, complete, self.out / f"{page.name}.md", last)
        self._write(finished, made, command)
        return finished

    def _with_data(self, pages: Sequence[Page], leave_out: bool) -> list[Page]:
        """Those whose data is there.

        Raises:
            UserError: where it is not, or of none of them.
        """
        there = []
        for page in pages:
            try:
                for data in page.data:
                    self.plan.open(data)
            except UserError as error:
                if not leave_out:
                    raise UserError(f"{page.name}: {error}") from error
                complain(f"{page.name} is left out: {error}")
                continue
            there.append(page)
        if not there:
            raise UserError("there is data for none of these: see above what to give")
        return there

    def _measured(self, page: Page, made: Made, run: str) -> Line:
        path, measure = made.checkpoint(run), page.measure
        assert measure is not None
        return kept(path, page.name, page.measures, lambda: measure(path, self.plan))

    def _shortened(self, page: Page) -> str:
        told = page.shortened_at(self.scale) if self.scale.name == SHORT else ""
        if self.scale.thin:
            data = "made-up data, " if self.plan.root == str(self.out / DATA_NAME) else ""
            told = f"{data}thin networks, two epochs: shows that everything runs, no more"
        set_here = [i for i in self.overrides if i.partition("=")[0].strip() not in _NO_MATTER]
        return "; but ".join([told] * bool(told) + [f"set {', '.join(set_here)}"] * bool(set_here))

    def _write(self, finished: Finished, made: Made, command: str) -> None:
        seed = min((r.line["seed"] for r in made.results.values()), default=0)
        device = choose_device(next(iter(self.plan.runs.values())).config.train.device)
        result = with_origin(finished.values, command=command, seed=seed, device=device)
        name = finished.page.name
        contents = {
            f"{name}.md": as_markdown(finished.values).encode(),
            f"{name}.json": (json.dumps(result, indent=2) + "\n").encode(),
            f"{name}.png": drawn(finished.page.plot(made), "png"),
        }
        write_together(self.out, contents)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thin networks are so small that threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_markdown(values: dict[str, Any]) -> str:
    """A page as Markdown, from what was written of it."""
    parts = [f"# {values['name']}: {values['title']}", *_words(values)]
    for number, table in enumerate(values["tables"]):
        parts += [f"## {table['title']}"] if number else []
        parts.append(markdown_table(table["header"], table["cells"]))
    return "\n\n".join(parts) + "\n"


def _words(values: dict[str, Any]) -> list[str]:
    shortened = f": {values['shortened']}" if values["shortened"] else ", the paper's schedule"
    return [f"Scale: {values['scale']}{shortened}.", *values["notes"]]


def _figures(
    row: Row, done: dict[str, RunResult], measured: dict[str, Line]
) -> list[dict[str, Any]]:
    found = []
    for run in row.runs:
        if run in done:
            own = measured.get(run, {})
            own = own.get(row.part, {}) if row.part else own
            try:
                found.append({**run_figures(done[run].figures), **own})
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"the result of {run} lacks figures ({error}): to train it again, remove its "
                    f"line of {RESULTS_NAME}, and those of runs that start or learn from it"
                ) from error
    return found
