"""From a trained network, or how to train one, to what is compared; mistakes are told first."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepmoe.checkpoint import Checkpoint, load_checkpoint, read_network
from deepmoe.compare import Method
from deepmoe.compare.li import published_widths
from deepmoe.compare.method import changed
from deepmoe.comparison.asked import NO_TEACHER, TEACHER, Asked
from deepmoe.config import (
    GIVEN,
    EmbeddingConfig,
    HeadsConfig,
    LossConfig,
    RunConfig,
    TrainConfig,
    apply_overrides,
    load_config,
)
from deepmoe.configured_models import model_from_config
from deepmoe.data import DataInfo, open_data
from deepmoe.errors import UserError
from deepmoe.graph import prunable
from deepmoe.sources import is_source
from deepmoe.sweep.grid import LESSONS
from deepmoe.training.lessons import only_lessons
from deepmoe.training.teachers import check_teacher

DISTILLATION = 0.9  # share of the loss that compares with teachers, if nothing else is said
# What a network's own training leaves to the methods: which channels run, and what is learnt from.
_OF_TRAINING = ("start", "prune", "prune_widths", "prune_by", "prune_tilt", "target_macs", "codes")
_OF_LOSS = ("sparsity", "norm_sparsity", "balance")
# What --set says of these is how to retrain; a preset's start is trained as the preset says.
_OF_SCHEDULE = (
    *("epochs", "batch_size", "lr", "schedule", "milestones", "lr_decay", "warmup"),
    *("momentum", "nesterov", "weight_decay"),
)
_OWNED = {
    *(f"train.{name}" for name in _OF_TRAINING),
    *(f"loss.{name}" for name in _OF_LOSS),
    *("train.teacher", "train.seed", "train.finetune_epochs"),
    *("model.gates", "model.exits", "model.kept", "model.experts"),
}
_OWNED_TABLES = ("heads",)


def open_comparison(
    methods: Sequence[Method],
    *,
    shares: Sequence[float],
    start: str | Path | None = None,
    preset: str | None = None,
    seeds: Sequence[int] = (0,),
    setting: str | None = None,
    published: bool = False,
    teachers: Sequence[str | Path] = (),
    teacher_preset: str | None = None,
    overrides: Sequence[str] = (),
    network: str | None = None,
) -> Asked:
    """Reads and checks what a comparison is made of; nothing is trained yet.

    Args:
        methods: rows of the table.
        shares: of the dense MACs.
        start: checkpoint of the trained, dense network.
        preset: or how to train it.
        seeds: of the runs.
        setting: of `li`: a network of the paper, whose widths take the place of shares.
        published: also retrain as each method's authors do.
        teachers: checkpoints to learn from, or one file of lessons.
        teacher_preset: or how to train some, one a seed.
        overrides: of the retraining, such as `train.epochs=10`, and of the data. A preset's start
            keeps the preset's schedule and loss.
        network: what makes the network, where it is not of the zoo.

    Raises:
        UserError: for what does not fit together.
    """
    _check_given(start, preset, network, teachers, teacher_preset)
    _check_overrides(overrides)
    paths = [Path(path) for path in teachers]
    taught = _teacher_settings(paths, teacher_preset)
    if start is not None:
        own, known = _from_checkpoint(Path(start), network)
        taught["train.start"] = str(Path(start).resolve())
    else:
        own, known = _ungated(load_config(str(preset))), None
    before = changed(own, taught)
    base = apply_overrides(before, overrides)
    _check_owned(before, base)
    if start is not None and base.model != own.model:
        raise UserError(f"the network is that of {start}: --set model... can't change it")
    info = _info(base, known)
    if only_lessons([str(path) for path in paths]) is None:  # of those, every run looks by itself
        for path in paths:
            check_teacher(path, _load_teacher(path, own.model.name, network), info, base)
    if info.task != "classification":
        raise UserError("compare takes networks that classify images, not segmentation")
    trained = None if preset is None else _start(before, base)
    return Asked(
        base=base,
        classes=info.classes,
        size=info.size,
        methods=tuple(methods),
        shares=tuple(shares),
        seeds=tuple(seeds),
        published=published,
        start=trained,
        teacher=None if teacher_preset is None else _teacher(teacher_preset, base),
        widths=None if setting is None else _widths(methods, setting, base, info),
        setting=setting,
        start_epochs=own.train.epochs,
        teacher_checkpoints=tuple(paths),
    )


def _check_given(
    start: str | Path | None,
    preset: str | None,
    network: str | None,
    teachers: Sequence[str | Path],
    teacher_preset: str | None,
) -> None:
    """Refuses what can't be given together."""
    if (start is None) == (preset is None):
        raise UserError(
            "give --start, the checkpoint of a trained dense network, or --preset, how to train "
            "one, and not both"
        )
    if network is not None and start is None:
        raise UserError("--network says what makes the network of --start: a preset names its own")
    if teachers and teacher_preset is not None:
        raise UserError("give --teacher or --teacher-preset, not both")


def _start(before: RunConfig, base: RunConfig) -> RunConfig:
    """How the start is trained: as the preset says, on the same images and device."""
    schedule = {f"train.{name}": getattr(before.train, name) for name in _OF_SCHEDULE}
    return changed(dataclasses.replace(base, loss=before.loss), {**NO_TEACHER, **schedule})


def _teacher(preset: str, base: RunConfig) -> RunConfig:
    """How teachers are trained: on the same images, all of them settings of the data."""
    return dataclasses.replace(_ungated(load_config(preset)), data=base.data)


def _check_overrides(overrides: Sequence[str]) -> None:
    for item in overrides:
        key = item.partition("=")[0].strip()
        if key in _OWNED or any(key.startswith(f"{table}.") for table in _OWNED_TABLES):
            raise UserError(f"{key} is up to the methods: --set can't change it here")


def _check_owned(before: RunConfig, after: RunConfig) -> None:
    """The same for settings that came as whole tables."""
    for key in _OWNED:
        table, _, name = key.partition(".")
        if getattr(getattr(before, table), name) != getattr(getattr(after, table), name):
            raise UserError(f"{key} is up to the methods: --set can't change it here")
    if before.heads != after.heads:
        raise UserError("heads are up to the methods: --set can't change them here")


def _from_checkpoint(path: Path, network: str | None) -> tuple[RunConfig, DataInfo]:
    loaded = load_checkpoint(path, network=network)
    if loaded.model.embedding is not None or loaded.model.gated:
        raise UserError(f"{path} is gated, or has an embedding: methods start from a dense network")
    if loaded.model.unpruned is not None:
        raise UserError(f"{path} is pruned already: methods start from the whole network")
    return _ungated(loaded.config), loaded.info


def _ungated(config: RunConfig) -> RunConfig:
    """The dense network of a configuration, with the schedule that it is trained by."""
    train, loss = TrainConfig(), LossConfig()
    plain: dict[str, Any] = {f"train.{name}": getattr(train, name) for name in _OF_TRAINING}
    plain |= {f"loss.{name}": getattr(loss, name) for name in _OF_LOSS}
    plain |= {**NO_TEACHER, "model.gates": "none", "model.exits": False, "model.kept": None}
    config = dataclasses.replace(config, heads=HeadsConfig())
    if config.embedding.form == "network":  # what is left of another run's start
        config = dataclasses.replace(config, embedding=EmbeddingConfig())
    # Without gates there is nothing to freeze: both stages are one.
    one_stage = {"train.epochs": config.train.total_epochs, "train.finetune_epochs": 0}
    return changed(config, {**plain, **one_stage})


def _info(config: RunConfig, known: DataInfo | None) -> DataInfo:
    """What the data is; refuses data of other classes than the network knows."""
    return open_data(config.data, batch_size=config.train.batch_size, info=known).info


def _teacher_settings(teachers: Sequence[Path], preset: str | None) -> dict[str, Any]:
    missing = [path for path in teachers if not path.is_file()]
    if missing:
        raise UserError(f"no checkpoint at {missing[0]}")
    if not teachers and preset is None:
        return {}
    named = tuple(str(path.resolve()) for path in teachers) if teachers else LESSONS + TEACHER
    return {"train.teacher": named, "loss.distillation": DISTILLATION}


def _load_teacher(path: Path, own: str, network: str | None) -> Checkpoint:
    """One of the zoo, or made as the start is."""
    name = read_network(path)
    if (is_source(name) or name == GIVEN) and name != own:
        raise UserError(
            f"{path} is made by {name}: teachers are of the zoo, or made as the start is. Others "
            "can write down what they say (deepmoe teach): give that file"
        )
    return load_checkpoint(path, network=network if name == own else None)


def _widths(
    methods: Sequence[Method], setting: str, base: RunConfig, info: DataInfo
) -> tuple[int, ...]:
    if any(method.name not in ("li", "li-greedy") for method in methods):
        raise UserError("--setting names a network of Li's paper: it is for li and li-greedy")
    model = model_from_config(changed(base, {"train.start": None}), info.classes, size=info.size)
    return published_widths(setting, base.model.name, prunable(model.gating.graph))
