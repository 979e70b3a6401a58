"""What a comparison is to train: every method at every cost, as one grid of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepmoe.compare import Cell, Method, Step
from deepmoe.compare.method import changed
from deepmoe.compare.reach import check_reach
from deepmoe.config import ANOTHER_RUN, RunConfig
from deepmoe.errors import UserError
from deepmoe.sweep.grid import Grid, Run, make_grid

START, TEACHER = "start", "teacher"  # names of the runs that come first, where they are trained
PUBLISHED = "published"  # ends the name of a row with the method's own schedule
NO_TEACHER = {
    "train.teacher": None,
    "loss.distillation": 0.0,
    "loss.embedding_distillation": 0.0,
}


@dataclass(frozen=True)
class Asked:
    """What is compared, and how.

    Attributes:
        base: network, data, schedule and teachers of all methods.
        classes: of the data.
        size: of its images.
        methods: rows of the table.
        shares: of the dense MACs, at each of which methods are compared.
        seeds: of all runs.
        published: whether methods also get a row with their authors' schedule.
        start: how the network is trained that all start from; `None` where `base.train.start` names
            a checkpoint.
        teacher: how teachers are trained; `None` where `base.train.teacher` names some, or none.
        widths: channels that are left of each group, instead of shares.
        setting: what these are called.
        start_epochs: that the start was trained for.
        teacher_checkpoints: that are learnt from, where they are given.
    """

    base: RunConfig
    classes: int
    size: tuple[int, int]
    methods: tuple[Method, ...]
    shares: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    published: bool = False
    start: RunConfig | None = None
    teacher: RunConfig | None = None
    widths: tuple[int, ...] | None = None
    setting: str | None = None
    start_epochs: int = 1
    teacher_checkpoints: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        for option, given in (("--macs", self.shares), ("--seeds", self.seeds)):
            twice = [value for value in given if given.count(value) > 1]
            if twice:
                raise UserError(f"{option} names {twice[0]:g} twice")
            if not given:
                raise UserError(f"{option} needs at least one number")
        if not self.methods or not all(isinstance(method, Method) for method in self.methods):
            raise UserError("a comparison needs methods, as method_named(NAME) gives them")
        for share in self.shares:
            if not 0 < share <= 1:
                raise UserError(f"--macs are shares of the dense MACs, above 0 to 1, not {share:g}")
        if any(method.fits_exits for method in self.methods) and not self.base.data.holdout:
            raise UserError(
                "exits are fitted on training images that were held out: set data.holdout, such as "
                "2000, for the start, too; or name other methods than ours-exits"
            )


@dataclass(frozen=True)
class Row:
    """A method at a cost: the runs that lead to its network.

    Attributes:
        method: the method.
        share: of the dense MACs.
        published: whether it is retrained as its authors do.
        steps: runs, in order; the last one gives the network.
    """

    method: Method
    share: float
    published: bool
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        """Of its last run."""
        return self.steps[-1].name

    @property
    def epochs(self) -> int:
        """Since the start, of all its runs: some methods train before they prune."""
        if self.method.name == START:
            return 0
        return sum(step.config.train.total_epochs for step in self.steps)


def rows_of(asked: Asked) -> list[Row]:
    """The rows of a comparison, with their runs.

    Raises:
        UserError: for a cost that a method can't reach, or a network that it does not fit.
    """
    rows = []
    base = _with_needs(asked)
    told_apart = {_percent(share): share for share in asked.shares}.values()  # by their runs' names
    for method in asked.methods:
        shares = (1.0,) if method.one_cost or asked.setting else told_apart
        for published in (False, True) if asked.published and method.published else (False,):
            label = f"{method.name}_{PUBLISHED}" if published else method.name
            schedule = {**NO_TEACHER, **method.published} if published else {}
            for share in shares:
                cost = asked.setting or _percent(share)
                name = label if method.one_cost else f"{label}-{cost}"
                cell = Cell(
                    changed(base, schedule),
                    share,
                    asked.classes,
                    asked.size,
                    name,
                    label,
                    asked.start_epochs,
                )
                steps = tuple(_with_widths(method.plan(cell), asked.widths))
                for step in steps:
                    check_reach(cell, step)
                rows.append(Row(method, share, published, steps))
    return rows


def start_row(asked: Asked) -> Row:
    """The network that all methods start from, as it is: it stands above every table."""
    step = Step(START, asked.start or asked.base)
    return Row(START_METHOD, 1.0, False, (step,))


def comparison_grid(asked: Asked, rows: Sequence[Row], jobs: int) -> Grid:
    """All runs of the rows, and those that they start and learn from; each once.

    One seed is finished before the next begins, so that a comparison that is stopped early has a
    whole table. Of each seed, the longest runs come first: they would be waited for at the end.
    """
    steps: dict[str, RunConfig] = {}
    for name, config in ((START, asked.start), (TEACHER, asked.teacher)):
        if config is not None:
            steps[name] = config
    for step in (step for row in rows for step in row.steps):
        assert steps.setdefault(step.name, step.config) == step.config, step.name
    runs = [
        Run(name, changed(config, {"train.seed": seed}))
        for seed in asked.seeds
        for name, config in sorted(steps.items(), key=lambda step: -step[1].train.total_epochs)
    ]
    return make_grid(runs, jobs)


def _with_needs(asked: Asked) -> RunConfig:
    """The configuration of all methods, which may start from a run of the same grid."""
    return changed(asked.base, {"train.start": ANOTHER_RUN + START} if asked.start else {})


def _with_widths(steps: list[Step], widths: tuple[int, ...] | None) -> list[Step]:
    """The same with given widths in the place of a share."""
    if widths is None:
        return steps
    *before, last = steps
    given = {"train.prune": None, "train.prune_widths": widths}
    return [*before, Step(last.name, changed(last.config, given))]


def _percent(share: float) -> str:
    """A share as part of a run's name."""
    return f"{100 * share:.10g}"


START_METHOD = Method(
    START, "dense: the start itself", "the network itself", lambda cell: [], one_cost=True
)
