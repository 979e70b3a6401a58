"""All that is found out about a trained model, for `deepmoe analyze` and `deepmoe report`."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepmoe.data import DataSource
from deepmoe.data.coarse_groups import coarse_groups
from deepmoe.errors import UserError
from deepmoe.evaluation import evaluate_on
from deepmoe.evaluation.accuracy import Evaluation
from deepmoe.evaluation.batches import Batches, EvenlySpread
from deepmoe.evaluation.curve import By, CurvePoint, cost_curve, usual_way
from deepmoe.evaluation.gate_record import GateRecord, collect_gates
from deepmoe.evaluation.memory import Memory, measure_memory
from deepmoe.evaluation.narrowing import used_channels
from deepmoe.evaluation.pictures import Picture, by_cost, show_images
from deepmoe.evaluation.routes import Routes, count_routes
from deepmoe.evaluation.segmentation_scores import SegmentationEvaluation
from deepmoe.evaluation.shuffling import DRAWS, Shuffling, shuffle_gates
from deepmoe.hard_moe import HardMoE
from deepmoe.layers.heads import without_autocast
from deepmoe.model import DeepMoE

PICTURES = 8  # of the cheapest images, and of the dearest
SHUFFLED = 1000  # images: the paper's 20 draws of each make 20,000 passes


@dataclass(frozen=True)
class Asked:
    """What to find out beyond a model's accuracy, costs and routes.

    Attributes:
        images: how many to go through, evenly spread; all of them if not given.
        shuffled: how many images to shuffle the gates of, about as many of each class.
        draws: of gates, for each of those.
        of_class: a class to shuffle by itself, with so many draws of every other class.
        memory: whether to measure it.
        seed: of the draws.
    """

    images: int | None = None
    shuffled: int = 0
    draws: int = DRAWS
    of_class: str | None = None
    memory: bool = False
    seed: int = 0


@dataclass(frozen=True)
class ExitCounts:
    """What the embedding has answered; accuracies are `None` where there are no such images."""

    threshold: float
    vote: float  # share of the embedding in the answers of the others
    images: int
    answered: int
    accuracy_answered: float | None
    accuracy_rest: float | None


@dataclass(frozen=True, eq=False)
class Findings:
    """What was found out about a model.

    Attributes:
        evaluated_on: which images: test, holdout, val ...
        evaluation: accuracy and mean cost.
        record: of every image.
        cheapest: images, as pictures.
        dearest: the same; none where all images cost the same.
        curve: accuracy against cost, by closing gates or by exits; none where there is no way.
        curve_by: which of these.
        exits: `None` without exits.
        routes: `None` without gates.
        shuffling: of all classes, if asked for.
        class_shuffling: of one class, if asked for.
        memory: if asked for.
        notes: what does not apply to this model, a sentence each.
    """

    evaluated_on: str
    evaluation: Evaluation | SegmentationEvaluation
    record: GateRecord
    cheapest: tuple[Picture, ...]
    dearest: tuple[Picture, ...]
    curve: tuple[CurvePoint, ...]
    curve_by: By | None
    exits: ExitCounts | None
    routes: Routes | None
    shuffling: Shuffling | None
    class_shuffling: Shuffling | None
    memory: Memory | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, but for the single images that are not shown."""
        macs = self.record.macs
        shares = (0, 5, 25, 50, 75, 95, 100)
        quantiles = dict(zip(map(str, shares), np.percentile(macs, shares).tolist(), strict=True))
        parts = ("exits", "routes", "shuffling", "class_shuffling", "memory")
        found = {name: getattr(self, name) for name in parts}
        exits = None if self.exits is None else asdict(self.exits)
        others = {k: None if v is None else v.as_dict() for k, v in found.items() if k != "exits"}
        return {
            "evaluated_on": self.evaluated_on,
            "evaluation": self.evaluation.as_dict(),
            "macs_percentiles": quantiles,
            "cheapest": [picture.as_dict() for picture in self.cheapest],
            "dearest": [picture.as_dict() for picture in self.dearest],
            "curve": [{"threshold": p.threshold, **p.result.as_dict()} for p in self.curve],
            "curve_by": self.curve_by,
            "exits": exits,
            **others,
            "notes": list(self.notes),
        }


def examine(model: DeepMoE, data: DataSource, asked: Asked | None = None) -> Findings:
    """Goes through the evaluation images, and finds out what there is to find out."""
    asked = asked or Asked()
    info, batches = data.info, data.evaluation
    chosen: Batches = batches if asked.images is None else EvenlySpread(batches, asked.images)
    if asked.of_class is not None and asked.of_class not in info.class_names:
        raise UserError(f"the data has no class named {asked.of_class}")
    evaluation = evaluate_on(model, info, chosen)
    record = collect_gates(model, chosen, info.class_names)
    cheapest, dearest = by_cost(record, PICTURES)
    if record.macs.min() == record.macs.max():
        dearest = dearest[:0]
    pictures = show_images(model, chosen, info, record, [*cheapest, *dearest])
    curve_by = _curve_by(model, info.task)
    shuffling, class_shuffling = _shuffled(model, chosen, record, asked)
    left = record.exited is not None and bool(record.exited.all())
    memory = None
    if asked.memory:
        first = next(iter(chosen))[0][:1]
        with without_autocast(next(model.parameters()).device):
            memory = measure_memory(model, first, used_channels(record) if record.gates else None)
    return Findings(
        evaluated_on=data.evaluation_name,
        evaluation=evaluation,
        record=record,
        cheapest=tuple(pictures[: len(cheapest)]),
        dearest=tuple(pictures[len(cheapest) :]),
        curve=() if curve_by is None else tuple(cost_curve(model, chosen, by=curve_by)),
        curve_by=curve_by,
        exits=_exits(model, record),
        routes=None if left or not record.gates else count_routes(record),
        shuffling=shuffling,
        class_shuffling=class_shuffling,
        memory=memory,
        notes=tuple(_notes(model, record, info.task)),
    )


def _curve_by(model: DeepMoE, task: str) -> By | None:
    """By what the cost of a model can be changed without training, if it can."""
    if task != "classification" or isinstance(model, HardMoE) or not _ahead(model):
        return None
    if not model.gated and model.embedding is None:
        return None
    fixed = model.codebook is not None and model.exit_at is None  # nobody taught it to answer
    return None if fixed else usual_way(model)


def _ahead(model: DeepMoE) -> bool:
    try:
        model.check_ahead()
    except UserError:
        return False
    return True


def _shuffled(
    model: DeepMoE, batches: Batches, record: GateRecord, asked: Asked
) -> tuple[Shuffling | None, Shuffling | None]:
    labels, names = record.labels, record.class_names
    if not record.gates or labels is None:
        return None, None
    if len(np.unique(labels)) < 2:
        if asked.of_class is not None:
            raise UserError(
                f"gates of {asked.of_class} can't be shuffled: these images are all of one class"
            )
        return None, None
    groups, seed = coarse_groups(names), asked.seed
    every = one = None
    if asked.shuffled:
        most = -(-asked.shuffled // len(np.unique(labels)))
        every = shuffle_gates(
            model, batches, names, groups=groups, draws=asked.draws, seed=seed, most=most
        )
    if asked.of_class is not None:
        draws = asked.draws * (len(np.unique(labels)) - 1)
        one = shuffle_gates(
            model, batches, names, groups=groups, draws=draws, seed=seed, only=asked.of_class
        )
    return every, one


def _exits(model: DeepMoE, record: GateRecord) -> ExitCounts | None:
    if record.exited is None or model.exit_at is None or record.scores is None:
        return None
    answered, rest = record.scores[record.exited], record.scores[~record.exited]
    return ExitCounts(
        threshold=float(model.exit_at),
        vote=0.0 if model.exit_vote is None else float(model.exit_vote),
        images=len(record),
        answered=len(answered),
        accuracy_answered=float(answered.mean()) if len(answered) else None,
        accuracy_rest=float(rest.mean()) if len(rest) else None,
    )


def _notes(model: DeepMoE, record: GateRecord, task: str) -> list[str]:
    """What does not apply, and why."""
    notes = []
    if isinstance(model, HardMoE):
        notes.append(
            "Each image runs one of several whole networks: there are no gates, no routes of "
            "channels and nothing to shuffle."
        )
    elif not model.gated:
        notes.append(
            "The network has no gates: there is no heat map, no route and nothing to shuffle."
        )
    if task == "segmentation":
        notes.append(
            "Each pixel has a class, and not the image: routes are not told by class, and gates "
            "are not shuffled."
        )
    if model.gated and model.on_the_way:
        notes.append(
            "Gates are made of features on the way: no channels can be removed ahead, and small "
            "gates are not closed for a curve."
        )
    if model.codebook is not None and model.exit_at is None:
        notes.append(
            "The routes of a codebook are fixed: its cost can't be changed by a threshold."
        )
    if len(np.unique(record.macs)) == 1 and record.labels is not None:
        notes.append("All images cost the same: none is cheaper or dearer than another.")
    if record.exited is not None and record.exited.all():
        notes.append("Exits have answered all images: none came to the base network.")
    return notes
