"""The runs that tables and figures need, each once, whichever of them asks for it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from deepmoe.compare import Cell, Step, method_named
from deepmoe.compare.li import published_widths
from deepmoe.compare.method import changed
from deepmoe.compare.reach import check_reach
from deepmoe.config import ANOTHER_RUN, DataConfig, RunConfig, apply_overrides, load_config
from deepmoe.data import DataInfo, open_data
from deepmoe.errors import UserError
from deepmoe.paper.networks import NETWORKS, thinned
from deepmoe.paper.recipes import (
    CODES,
    FEW_CODES,
    LITERAL,
    LITERAL_LAST,
    OURS,
    OURS_OF_DATA,
    OURS_SCHEDULE,
    TEACHERS,
)
from deepmoe.paper.scales import COMMON, Scale
from deepmoe.paper.sources import SOURCES, Source
from deepmoe.sweep import Grid, Run
from deepmoe.sweep.grid import BETWEEN, LESSONS, make_grid, run_name

_OWNED_TABLES = ("model", "embedding", "heads", "loss")
_OWNED = ("seed", "start", "teacher", "prune", "prune_widths", "prune_by", "target_macs", "codes")


class Plan:
    """Collects runs at a scale. Those of one name are of one configuration.

    Args:
        scale: how long they train.
        overrides: settings of all runs, as for `--set`.
        made_up: folder of made-up data, which the smoke scale uses where no other is given.
        seeds: of all rows; as the scale says if not given.
    """

    def __init__(
        self,
        scale: Scale,
        overrides: Sequence[str] = (),
        made_up: str | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        self.scale = scale
        self.runs: dict[str, Run] = {}
        self.data_of: dict[str, str] = {}  # the data that each run is trained on, by its key
        self._overrides = tuple(overrides)
        self._made_up = made_up
        self._seeds = None if seeds is None else tuple(seeds)
        self._infos: dict[str, DataInfo] = {}
        self._images: dict[str, int] = {}  # of the data that is there, to evaluate on
        self._in_reach: set[str] = set()  # runs whose costs have been looked at

    @cached_property
    def root(self) -> str:
        """Where data is looked for."""
        given = apply_overrides(RunConfig(), self._overrides).data.root
        if self._made_up is not None and given == DataConfig().root:
            return self._made_up
        return given

    def grid(self, jobs: int) -> Grid:
        """All runs so far, those of a seed and what they need before those of the next.

        What is stopped has then left whole tables of one seed, not half a table of three.
        """
        runs = list(self.runs.values())
        first = {run.name: run.config.train.seed for run in runs}  # the first seed that needs it
        for run in reversed(make_grid(runs, jobs).in_order):
            for need in run.needs:
                first[need] = min(first[need], first[run.name])
        runs.sort(key=lambda run: first[run.name])
        return make_grid(runs, jobs, self.scale.views or Grid.views)

    def seeds(self, wanted: int) -> tuple[int, ...]:
        """So many seeds, unless the scale has fewer, or others were asked for."""
        if self._seeds is not None:
            return self._seeds
        return tuple(range(min(wanted, self.scale.most_seeds)))

    def open(self, data: str) -> DataInfo:
        """What the data is that is there.

        Raises:
            UserError: where it is missing or can't be used; it says what to give.
        """
        if data not in self._infos:
            source, config = SOURCES[data], self.data_config(data)
            try:
                opened = open_data(config, batch_size=2)
                self._infos[data], self._images[data] = opened.info, opened.evaluation.images
            except UserError as error:
                raise UserError(
                    f"{source.title} can't be used ({error}): with --set data.root=PATH, give "
                    f"{source.layout}; looked for in {source.looked_for(self.root)}"
                ) from error
        return self._infos[data]

    def images(self, data: str) -> int:
        """How many images of it networks are evaluated on.

        Raises:
            UserError: as `open` does.
        """
        self.open(data)
        return self._images[data]

    def data_config(self, data: str) -> DataConfig:
        """Where the images of all runs on this data come from."""
        network = {"imagenet": "resnet18", "cityscapes": "drn_a_50"}.get(data, "vgg16")
        return self._base(data, network, 1.0, 0).data

    def dense(self, data: str, network: str, seed: int, *, wide: float = 1.0) -> str:
        """The network without gates."""
        config = self._dense_config(data, network, wide, seed)
        return self._add(data, _group(data, network, wide, "dense"), config)

    def literal(
        self,
        data: str,
        network: str,
        seed: int,
        *,
        wide: float = 1.0,
        mean_sparsity: float | None = None,
    ) -> str:
        """The paper's recipe as `LITERAL` reads it.

        `mean_sparsity` is a lambda for the mean of a layer's gates instead: lambdas above one fit
        no other reading.
        """
        settings = dict(LITERAL)
        if NETWORKS[network].gates_last:
            settings |= LITERAL_LAST
        kind = "literal"
        if mean_sparsity is not None:
            settings |= {"loss.l1": "mean", "loss.sparsity": mean_sparsity}
            kind = f"literal-{mean_sparsity:g}"
        config = changed(self._base(data, network, wide, seed), settings)
        return self._add(data, _group(data, network, wide, kind), config)

    def ours(self, data: str, network: str, share: float, seed: int, *, wide: float = 1.0) -> str:
        """Our own recipe: a share of the channels of each layer, warm start, distillation."""
        config = self._ours_config(data, network, share, seed, wide)
        return self._add(data, _group(data, network, wide, f"ours-{100 * share:g}"), config)

    def codes(self, data: str, network: str, share: float, seed: int) -> str:
        """Ours, trained on with the routes of a codebook in place of its own."""
        start = self.ours(data, network, share, seed)
        config = self._ours_config(data, network, share, seed, 1.0)
        settings = {
            "train.start": ANOTHER_RUN + start,
            "train.codes": FEW_CODES if self.scale.thin else CODES,
            "train.epochs": 0,
            "train.schedule": "one-cycle",
        }
        return self._add(data, _group(data, network, 1.0, "codes"), changed(config, settings))

    def method(
        self,
        data: str,
        network: str,
        method: str,
        share: float,
        seed: int,
        *,
        setting: str | None = None,
    ) -> str:
        """A method of `deepmoe.compare` at a share of the dense MACs, or at a setting of Li's."""
        start = self.dense(data, network, seed)
        base = self._dense_config(data, network, 1.0, seed)
        base = changed(base, {"train.start": ANOTHER_RUN + start})
        info = self._infos.get(data)
        classes = SOURCES[data].classes if info is None else info.classes
        size = SOURCES[data].size if info is None else info.size
        label, cost = _group(data, network, 1.0, method), setting or f"{100 * share:g}"
        cell = Cell(base, share, classes, size, f"{label}-{cost}", label, base.train.epochs)
        *before, last = method_named(method).plan(cell)
        if setting is not None:
            widths = published_widths(setting, base.model.name, cell.prunable())
            given = {"train.prune": None, "train.prune_widths": widths}
            last = Step(last.name, changed(last.config, given))
        for step in (*before, last):
            if step.name not in self._in_reach:  # of any seed
                check_reach(cell, step)
                self._in_reach.add(step.name)
            name = self._add(data, step.name, step.config)
        return name

    def _ours_config(
        self, data: str, network: str, share: float, seed: int, wide: float
    ) -> RunConfig:
        start = self.dense(data, network, seed, wide=wide)
        settings: dict[str, Any] = {
            **OURS,
            **OURS_OF_DATA.get(data, {}),
            "heads.init": f"split({share:g})",
            "train.start": ANOTHER_RUN + start,
            "train.teacher": self._taught_by(data, start),
        }
        schedule = OURS_SCHEDULE[SOURCES[data].kind] if not self._schedule(data) else {}
        return changed(self._base(data, network, wide, seed, schedule), settings)

    def _taught_by(self, data: str, start: str) -> str | tuple[str, ...]:
        """Dense networks, or what the first of them have said once; its own start elsewhere."""
        teachers, seeds = TEACHERS.get(data, ()), self.scale.teachers
        if teachers and self.scale.views:
            network, _ = teachers[0]
            # By their names: of which seeds there are others depends on what else is asked for.
            return LESSONS + BETWEEN.join(self.dense(data, network, seed) for seed in seeds)
        names = [
            self.dense(data, network, seed)
            for network, of_all in teachers
            for seed in (seeds if of_all else seeds[:1])
        ]
        return tuple(ANOTHER_RUN + name for name in names or [start])

    def _schedule(self, data: str) -> Mapping[str, Any]:
        return self.scale.settings[SOURCES[data].kind]

    def _dense_config(self, data: str, network: str, wide: float, seed: int) -> RunConfig:
        config = self._base(data, network, wide, seed)
        # Without gates there is nothing to freeze: both stages are one.
        one_stage = {"train.epochs": config.train.total_epochs, "train.finetune_epochs": 0}
        plain = {"model.gates": "none", "loss.sparsity": 0.0}
        return changed(config, {**plain, **one_stage})

    def _base(
        self,
        data: str,
        network: str,
        wide: float,
        seed: int,
        schedule: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """The network with the scale's schedule, and what a user has set."""
        source, known = SOURCES[data], NETWORKS[network]
        config = load_config(known.preset.format(data=data))
        scaled = {**COMMON, **(schedule or {}), **self._schedule(data)}
        config = changed(config, {**known.settings, "model.wide": wide, **scaled})
        if self.scale.thin:
            config = thinned(config)
        given = apply_overrides(config, self._overrides)
        _check_owned(config, given, source)
        place = source.place(self.root)
        return changed(given, {"data.root": place, "train.seed": seed})

    def _add(self, data: str, group: str, config: RunConfig) -> str:
        run = Run(group, config)
        assert self.runs.setdefault(run.name, run) == run, run.name
        self.data_of[run.name] = data
        return run_name(group, config.train.seed)


def _group(data: str, network: str, wide: float, kind: str) -> str:
    """What runs are called that differ in their seeds alone."""
    widened = "" if wide == 1 else f"-wide{wide:g}"
    return f"{data}-{network}{widened}-{kind}"


def _check_owned(before: RunConfig, after: RunConfig, source: Source) -> None:
    """Refuses settings that are what a table compares."""
    changed_tables = [t for t in _OWNED_TABLES if getattr(before, t) != getattr(after, t)]
    keys = [f"train.{k}" for k in _OWNED if getattr(before.train, k) != getattr(after.train, k)]
    for key in (*changed_tables, *keys):
        raise UserError(
            f"{key} is what tables and figures of the paper compare: --set can't change it here"
        )
    if after.data.name not in source.names:
        raise UserError(
            f"{source.title} is read as data.name = {' or '.join(source.names)}, not "
            f"{after.data.name}"
        )
