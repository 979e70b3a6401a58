"""From a trained network, or how to train one, to what is compared; mistakes are told first."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepmoe.checkpoint import load_checkpoint
from deepmoe.compare import Method
from deepmoe.compare.li import published_widths
from deepmoe.compare.method import changed
from deepmoe.comparison.asked import DISTILLATION, NO_TEACHER, Asked
from deepmoe.config import (
    EmbeddingConfig,
    HeadsConfig,
    LossConfig,
    RunConfig,
    TrainConfig,
    apply_overrides,
    load_config,
)
from deepmoe.data import DataInfo, open_data
from deepmoe.errors import UserError
from deepmoe.graph import prunable
from deepmoe.registry import model_from_config

# What a network's own training leaves to the methods: which channels run, and what is learnt from.
_OF_TRAINING = ("start", "prune", "prune_widths", "prune_by", "prune_tilt", "target_macs", "codes")
_OF_LOSS = ("sparsity", "norm_sparsity", "balance")


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
        teachers: checkpoints to learn from.
        teacher_preset: or how to train some, one a seed.
        overrides: of the retraining, such as `train.epochs=10`, and of the data.
        network: what makes the network, where it is not of the zoo.

    Raises:
        UserError: for what does not fit together.
    """
    if (start is None) == (preset is None):
        raise UserError(
            "give --start, the checkpoint of a trained dense network, or --preset, how to train "
            "one, and not both"
        )
    if teachers and teacher_preset is not None:
        raise UserError("give --teacher or --teacher-preset, not both")
    taught = _teacher_settings([Path(path) for path in teachers])
    begin: RunConfig | None = None
    if start is not None:
        base, info = _from_checkpoint(Path(start), network, overrides)
        base = changed(base, {"train.start": str(Path(start).resolve()), **taught})
    else:
        assert preset is not None
        begin = _ungated(load_config(preset, overrides))
        info = _info(begin, None)
        base = changed(begin, taught)
    teacher = None
    if teacher_preset is not None:
        data = dataclasses.asdict(base.data)
        same = {f"data.{name}": data[name] for name in ("name", "root", "holdout")}
        teacher = changed(_ungated(load_config(teacher_preset)), same)
    if info.task != "classification":
        raise UserError("compare takes networks that classify images, not segmentation")
    return Asked(
        base=base,
        classes=info.classes,
        size=info.size,
        methods=tuple(methods),
        shares=tuple(shares),
        seeds=tuple(seeds),
        published=published,
        start=begin,
        teacher=teacher,
        widths=None if setting is None else _widths(methods, setting, base, info),
        setting=setting,
    )


def _from_checkpoint(
    path: Path, network: str | None, overrides: Sequence[str]
) -> tuple[RunConfig, DataInfo]:
    loaded = load_checkpoint(path, network=network)
    if loaded.model.embedding is not None or loaded.model.gated:
        raise UserError(f"{path} is gated, or has an embedding: methods start from a dense network")
    if loaded.model.unpruned is not None:
        raise UserError(f"{path} is pruned already: methods start from the whole network")
    config = apply_overrides(_ungated(loaded.config), overrides)
    if config.model != _ungated(loaded.config).model:
        raise UserError(f"the network is that of {path}: --set model... can't change it")
    return config, _info(config, loaded.info)


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


def _teacher_settings(teachers: Sequence[Path]) -> dict[str, Any]:
    missing = [path for path in teachers if not path.is_file()]
    if missing:
        raise UserError(f"no checkpoint at {missing[0]}")
    if not teachers:
        return {}
    paths = tuple(str(path.resolve()) for path in teachers)
    return {"train.teacher": paths, "loss.distillation": DISTILLATION}


def _widths(
    methods: Sequence[Method], setting: str, base: RunConfig, info: DataInfo
) -> tuple[int, ...]:
    if any(method.name not in ("li", "li-greedy") for method in methods):
        raise UserError("--setting names a network of Li's paper: it is for li and li-greedy")
    model = model_from_config(changed(base, {"train.start": None}), info.classes, size=info.size)
    return published_widths(setting, base.model.name, prunable(model.gating.graph))
