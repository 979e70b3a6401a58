"""Going through images with a model: the one loop that every measurement shares."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepmoe.costs import active_share, count_macs
from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.graph import evaluation_mode
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.progress import progress

Batches = Iterable[tuple[Tensor, Tensor]]
"""Normalised images and their labels."""


def batches_for(
    model: DeepMoE,
    batches: Batches,
    most: int | None = None,
    doing: str = "going through images",
    *,
    classes: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels where the model is; it is in evaluation mode meanwhile.

    Args:
        model: to go through the images with.
        batches: such as a `BatchLoader`.
        most: how many images to stop at; the last batch is cut.
        doing: what for, in words for the person watching.
        classes: that labels are of, where these are used.

    Raises:
        UserError: where there are no images.
    """
    check_model(model)
    device, seen = next(model.parameters()).device, 0
    there = getattr(batches, "images", None)
    total = min((n for n in (there, most) if n is not None), default=None)
    with evaluation_mode(model), progress(doing, total, "images") as work:
        for x_BCHW, labels in checked_batches(batches, classes):
            room = len(x_BCHW) if most is None else min(len(x_BCHW), most - seen)
            yield model.as_input(x_BCHW[:room]), labels[:room].to(device)
            seen += room
            work.advance(room)
            if seen == most:
                break
    if not seen:
        raise UserError("there are no images to go through")


class EvenlySpread:
    """Some of a loader's images, evenly spread over all of them: files often lie sorted by class.

    Args:
        loader: gives batches in order.
        most: how many images to give; all if there are no more.
    """

    def __init__(self, loader: Loader, most: int) -> None:
        if most < 1:
            raise UserError(f"at least one image is needed, not {most}")
        self.loader = loader
        self.images = min(most, loader.images)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        total, start = self.loader.images, 0
        numbers = torch.arange(self.images) * total // max(1, self.images)
        for x_BCHW, labels in self.loader:
            inside = (numbers >= start) & (numbers < start + len(x_BCHW))
            chosen = (numbers[inside] - start).to(x_BCHW.device)
            start += len(x_BCHW)
            if len(chosen):
                yield x_BCHW[chosen], labels[chosen.to(labels.device)]


def check_model(model: Any) -> None:
    """Refuses what is no model of ours."""
    if not isinstance(model, DeepMoE):
        kind = type(model).__name__
        raise UserError(f"a deepmoe model is needed, not a {kind}: see create_model and gate")


def checked_batches(batches: Any, classes: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of anybody's, one after the other.

    Args:
        batches: such as a torch `DataLoader`.
        classes: that labels are of; `None` where nobody looks at them.

    Raises:
        UserError: for what are no batches of images and labels.
    """
    try:
        each = iter(batches)
    except TypeError as error:
        kind = type(batches).__name__
        raise UserError(f"batches come from a DataLoader or a list, not from a {kind}") from error
    for batch in each:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not all(isinstance(part, Tensor) for part in batch):
            raise UserError(
                "a batch must be a pair of tensors, images and their labels: put a dataset into a "
                "torch DataLoader first"
            )
        x_BCHW, labels = batch
        if x_BCHW.dim() != 4 or not labels.dim() or len(x_BCHW) != len(labels):
            shapes = f"{tuple(x_BCHW.shape)} and {tuple(labels.shape)}"
            raise UserError(
                "a batch holds images (images, channels, height, width) and a label for each, "
                f"not tensors of {shapes}; put a dataset into a torch DataLoader first"
            )
        on_cpu = labels.device.type == "cpu"  # a GPU would be waited for
        if classes is not None and labels.dim() == 1 and on_cpu:
            _check_labels(labels, classes)
            labels = labels.long()  # whatever whole numbers they are: a loss takes no others
        yield x_BCHW, labels


def _check_labels(labels: Tensor, classes: int) -> None:
    if labels.is_floating_point() or labels.is_complex():
        raise UserError(f"labels are whole numbers, not of {labels.dtype}")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise UserError(
            f"labels are from 0 to {classes - 1}, as the network has {classes} classes, not from "
            f"{int(labels.min())} to {int(labels.max())}"
        )


def size_of(x_BCHW: Tensor) -> tuple[int, int]:
    """Height and width of images."""
    return x_BCHW.shape[-2], x_BCHW.shape[-1]


def summed_costs(model: DeepMoE, size: tuple[int, int], output: DeepMoEOutput) -> list[Tensor]:
    """Over the images of a batch, the sums of their MACs and of the shares of channels that run."""
    images = torch.ones(len(output.logits), dtype=torch.float64, device=output.logits.device)
    active = images if output.gates is None else active_share(output.gates).double()
    if output.exited is not None:
        active = active * ~output.exited
    macs = images * count_macs(model, size, output.gates, output.exited)
    return [macs.sum(), active.sum()]


@torch.no_grad()
def gates_of_images(model: DeepMoE, batches: Batches, most: int) -> Tensor:
    """The gates of so many images at most, of all layers; no codebook is looked at."""
    model.check_ahead()
    assert model.embedding is not None
    found = []
    for x_BCHW, _ in batches_for(model, batches, most):
        e_BD, _ = model.embedding(x_BCHW)
        found.append(model.concatenated_gates(e_BD))
    return torch.cat(found)
