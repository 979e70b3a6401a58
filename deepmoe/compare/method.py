"""What a method of the comparison is: the runs that lead to its network at a cost."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepmoe.compare.task import Select, check_norms
from deepmoe.config import PruneBy, RunConfig
from deepmoe.configured_models import model_from_config
from deepmoe.graph import Gating, prunable
from deepmoe.model import DeepMoE
from deepmoe.sources import is_source


@dataclass(frozen=True)
class Cell:
    """One cell of the comparison: a trained network, a cost, and how to retrain.

    Attributes:
        base: network without gates, data, schedule and teachers. Its `train.start` is the network
            that all methods start from.
        share: of the dense MACs.
        classes: of the data.
        size: of its images.
        name: of the cell's last run.
        method: of the cell, for what its costs have in common.
        start_epochs: that the start was trained for.
    """

    base: RunConfig
    share: float
    classes: int
    size: tuple[int, int]
    name: str
    method: str
    start_epochs: int

    def model(self) -> DeepMoE:
        """The network of the base, all channels of it, without weights where that can be."""
        plain = changed(self.base, {"model.kept": None, "model.gates": "none", "train.start": None})
        with torch.device("cpu" if is_source(plain.model.name) else "meta"):
            return model_from_config(plain, self.classes, size=self.size, weights=False)

    def prunable(self) -> Gating:
        """Its groups that can lose channels."""
        return prunable(self.model().gating.graph)

    def check_norms(self) -> None:
        """Refuses a network whose batch norms don't scale what can be pruned."""
        check_norms(self.model().network, self.prunable())


@dataclass(frozen=True)
class Step:
    """One run on the way to a method's network. `run:NAME` names the checkpoint of another."""

    name: str
    config: RunConfig


Plan = Callable[[Cell], list[Step]]


@dataclass(frozen=True)
class Method:
    """A row of the comparison.

    Attributes:
        name: on the command line, and of its runs.
        title: for people.
        source: where it was published.
        plan: the runs, in order; the last one gives the network.
        select: which channels stay, of methods that prune.
        dynamic: whether what runs differs from image to image.
        published: settings of the schedule that its authors retrain with, where it is known.
        fits_exits: whether exits are fitted to the last run, for the cost.
        one_cost: whether it has the same cost at every budget, as the dense network has.
        streams: whether it prunes residual streams, too.
    """

    name: str
    title: str
    source: str
    plan: Plan
    select: Select | None = None
    dynamic: bool = False
    published: Mapping[str, Any] = field(default_factory=dict)
    fits_exits: bool = False
    one_cost: bool = False
    streams: bool = False


def pruned(
    by: PruneBy,
    title: str,
    source: str,
    select: Select,
    *,
    tilt: float = 0.0,
    published: Mapping[str, Any] | None = None,
    streams: bool = False,
) -> Method:
    """A method that removes channels of the trained network, which is then retrained."""

    def plan(cell: Cell) -> list[Step]:
        return [Step(cell.name, pruned_config(cell, by, tilt=tilt))]

    return Method(by, title, source, plan, select, published=published or {}, streams=streams)


def pruned_config(
    cell: Cell, by: PruneBy, settings: Mapping[str, Any] | None = None, *, tilt: float = 0.0
) -> RunConfig:
    """The run that prunes its start to the cell's share by a method, and retrains it."""
    asked = {"train.prune": cell.share, "train.prune_by": by, "train.prune_tilt": tilt}
    return changed(cell.base, {**asked, **(settings or {})})


def changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """A configuration with other values, by keys such as `train.lr`."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return dataclasses.replace(
        config,
        **{table: dataclasses.replace(getattr(config, table), **v) for table, v in tables.items()},
    )
