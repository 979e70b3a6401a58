"""Figures that only a checkpoint can tell; measured once, and kept beside it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deepmoe.checkpoint import Checkpoint, load_checkpoint
from deepmoe.data import DataSource, open_data
from deepmoe.devices import autocast, choose_device, choose_precision
from deepmoe.errors import UserError, reason
from deepmoe.evaluation.batches import batches_for
from deepmoe.files import is_newer, read_regular, write_atomically
from deepmoe.paper.page import MOST, Like, Line
from deepmoe.paper.plan import Plan

TOP = 5
FIGURES = "figures"  # what a file of them holds
TOP_ERRORS = {"top5": float}  # what `top_errors` gives


def kept(checkpoint: Path, name: str, like: Like, measure: Callable[[], Line]) -> Line:
    """What was measured of a checkpoint, or is now.

    Args:
        checkpoint: of a finished run.
        name: of the page that measures.
        like: what its figures are.
        measure: gives the figures.

    Raises:
        UserError: where the checkpoint is gone, or what was kept is damaged.
    """
    if not checkpoint.exists():
        raise UserError(
            f"{checkpoint} is gone though the run's result is there: to train it again, remove "
            "its line of runs.jsonl, and those of runs that start or learn from it"
        )
    path = checkpoint.with_name(f"{name}.json")
    if is_newer(path, checkpoint):
        return _read(path, like)
    figures = measure()
    write_atomically(path, json.dumps({FIGURES: figures}, indent=2).encode())
    return figures


def _read(path: Path, like: Like) -> Line:
    try:
        found = json.loads(read_regular(path))
    except PermissionError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except (OSError, ValueError, RecursionError):
        found = None
    if not fits(found, {FIGURES: like}):
        raise UserError(f"{path} is damaged: remove it, and call this again")
    return found[FIGURES]


def fits(value: Any, like: Any) -> bool:
    """Whether plain values, such as anybody may have written, are what they are taken for.

    Args:
        value: from JSON.
        like: a type; `[like]` for a list of any length, `(like, like)` for one of so many values;
            a table of its keys, or `{str: like}` with any keys. A key whose type has `None` may be
            missing. Numbers are finite.
    """
    if isinstance(like, dict):
        if not isinstance(value, dict):
            return False
        if str in like:
            return all(fits(inner, like[str]) for inner in value.values())
        known = all(fits(value.get(key), kind) for key, kind in like.items())
        return known and value.keys() <= like.keys()
    if isinstance(like, list | tuple):
        kinds = like * len(value) if isinstance(like, list) and isinstance(value, list) else like
        if not isinstance(value, list) or len(value) != len(kinds):
            return False
        return all(fits(inner, kind) for inner, kind in zip(value, kinds, strict=True))
    if isinstance(value, bool):
        return like is bool
    if isinstance(value, int | float) and isinstance(1.0, like):  # a whole number is one, too
        return abs(value) < MOST  # which nan is not
    return isinstance(value, like) and (not isinstance(value, int) or abs(value) < MOST)


@contextmanager
def opened(path: Path, plan: Plan, data: str) -> Iterator[tuple[Checkpoint, DataSource]]:
    """A checkpoint on the device and in the precision it was trained in, and its data."""
    loaded = load_checkpoint(path)
    train = loaded.config.train
    device = choose_device(train.device)
    loaded.model.to(device)
    source = open_data(plan.data_config(data), batch_size=2, device=device, info=loaded.info)
    with autocast(device, choose_precision(train.precision, device)):
        yield loaded, source


@torch.inference_mode()
def top_errors(path: Path, plan: Plan, data: str) -> Line:
    """Top-5 error in percent, on the images that accuracy is measured on."""
    wrong = images = 0
    with opened(path, plan, data) as (loaded, source):
        for x_BCHW, labels in batches_for(loaded.model, source.evaluation):
            logits = loaded.model(x_BCHW).logits
            best = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
            wrong += int((best != labels[:, None]).all(dim=1).sum())
            images += len(labels)
    return {"top5": 100 * wrong / images}
