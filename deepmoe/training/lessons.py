"""What teachers say of every training image, written down once and learnt from by many runs.

A teacher that looks at every batch of every run costs more than the small network that it teaches.
Here the teachers look at a few augmented views of each image once. A run that learns from their
notes shows its network one of these views in each epoch, the next one in the next.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from deepmoe.checkpoint import load_checkpoint, read_network
from deepmoe.config import GIVEN, RunConfig, apply_overrides
from deepmoe.data import BatchLoader, DataInfo, Loader, Split, open_data
from deepmoe.data.loader import ViewLoader
from deepmoe.devices import autocast, choose_device, choose_precision
from deepmoe.errors import UserError
from deepmoe.files import check_writable, write_atomically
from deepmoe.model import can_be_captured
from deepmoe.progress import followed
from deepmoe.training.teachers import Teachers, beside

FORMAT = "deepmoe-lessons"
OUTPUTS, IMAGES = "outputs", "images"  # names of the tensors
BATCH = 1000
MOST_VIEWS = 10_000


@dataclass(frozen=True)
class Lessons:
    """What was written down."""

    views: int
    images: int


def teach_from(
    checkpoints: Sequence[Path],
    views: int,
    out: Path,
    overrides: Sequence[str] = (),
    networks: Sequence[str] = (),
) -> Lessons:
    """Writes down what trained networks say of the images that they have learnt from.

    Args:
        checkpoints: that were trained on the same images.
        views: of each image.
        out: file to write.
        overrides: of the data's settings, such as `data.root=PATH`.
        networks: what makes the networks that are not the zoo's own.

    Raises:
        UserError: where the checkpoints differ in their images or classes, or a network that is
            not the zoo's own is not named.
    """
    if not 1 <= views <= MOST_VIEWS:
        raise UserError(f"views must be from 1 to {MOST_VIEWS:,}, not {views}")
    check_writable(out)
    makers = [_maker(path, networks) for path in checkpoints]
    unused = [name for name in networks if name not in makers]
    if unused:
        raise UserError(f"none of the teachers is made by {unused[0]}")
    loaded = [
        load_checkpoint(path, network=maker)
        for path, maker in zip(checkpoints, makers, strict=True)
    ]
    first = loaded[0]
    for path, other in zip(checkpoints, loaded, strict=True):
        if _data_of(other.config) != _data_of(first.config) or other.info != first.info:
            raise UserError(f"{path} was trained on other images than {checkpoints[0]}")
    config = apply_overrides(first.config, overrides)
    if _data_of(config) != _data_of(first.config):
        raise UserError("teachers must be cached on the images that they were trained on")
    device = choose_device(config.train.device)
    data = open_data(config.data, batch_size=BATCH, device=device, info=first.info)
    teachers = Teachers([beside(c.model, device) for c in loaded]).requires_grad_(False).eval()
    teachers.to(next(teachers.parameters()).dtype)  # all in the precision of the first
    if device.type == "cuda" and can_be_captured(teachers):
        teachers.compile(dynamic=False)
    loader = _in_memory(data.train)
    with autocast(device, choose_precision(config.train.precision, device)):
        write_lessons(out, teachers, loader, data.info, views)
    return Lessons(views, len(loader.split))


def _maker(path: Path, networks: Sequence[str]) -> str | None:
    """Which of the named networks a teacher is made by; teachers may differ in that."""
    name = read_network(path)
    if name == GIVEN and len(networks) == 1:
        return networks[0]
    return name if name in networks else None


def _data_of(config: RunConfig) -> tuple[str, int]:
    return config.data.name, config.data.holdout


def write_lessons(
    path: Path,
    teachers: Teachers,
    loader: Loader,
    info: DataInfo,
    views: int,
    seed: int = 0,
) -> None:
    """Lets teachers look at views of all training images, and writes their outputs to a file.

    Args:
        path: of the file.
        teachers: on the loader's device, in evaluation mode.
        loader: of training images that lie in memory.
        info: of the data.
        views: how many of each image.
        seed: of the views.
    """
    plain = _in_memory(loader)
    count = len(plain.split)
    images = ViewLoader(plain, views, seed, torch.arange(count), count)
    outputs_VNC = torch.empty(views, count, info.classes, dtype=torch.half)
    heard_NC = torch.empty_like(outputs_VNC[0], device=plain.device)
    precision = next(teachers.parameters()).dtype
    for number in followed(range(views), "teachers look", views, "views"):
        # Each answer is copied at once: what a compiled teacher gives may be its own memory.
        for said_BC, x_BCHW in zip(
            heard_NC.split(plain.batch_size), images.view(number), strict=True
        ):
            said_BC.copy_(teachers(x_BCHW.to(precision)))
        outputs_VNC[number] = heard_NC
    if not bool(outputs_VNC.isfinite().all()):
        raise UserError("the teachers' outputs are not finite")
    header = {"format": FORMAT, "seed": str(seed), "looks": _looks(images, info)}
    tensors = {OUTPUTS: outputs_VNC, IMAGES: fingerprints(plain.split)}
    write_atomically(path, save(tensors, header))


def is_lessons(path: str) -> bool:
    """Whether a file holds outputs of teachers, not a network."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError):
        return False


class TaughtLoader(ViewLoader):
    """Training batches with the teachers' outputs: (images, labels, outputs).

    Args:
        path: of a file that `write_lessons` has written.
        loader: of the run's training images, the same as theirs.
        info: of the run's data.

    Raises:
        UserError: where the file is damaged, or of other images, views or classes.
    """

    def __init__(self, path: str, loader: Loader, info: DataInfo) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                seed, looks = int(header["seed"]), header["looks"]
                outputs, known = file.get_tensor(OUTPUTS), file.get_tensor(IMAGES)
            views, drawn, classes = outputs.shape
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise UserError(f"{path} is damaged: run deepmoe teach again") from error
        plain = _in_memory(loader)
        numbers = _find(fingerprints(plain.split), known)
        super().__init__(plain, max(1, views), seed, numbers.clamp_min(0), drawn)
        fits = views and len(known) == drawn and classes == info.classes and numbers.min() >= 0
        if not fits or looks != _looks(self, info):
            raise UserError(
                f"{path} was written for other training images, crops or classes than this run "
                "has: data.name, holdout, mirror and crop_padding must be the same"
            )
        self.outputs_VNC = outputs.to(self.device)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:  # type: ignore[override]
        """The batches of one training epoch, from batch `start` on."""
        outputs_NC = self.outputs_VNC[number % self.views]
        for batch, chosen in zip(
            super().epoch(number, start), self.chosen(number, start), strict=True
        ):
            yield *batch, outputs_NC[self.numbers[chosen]]


def _in_memory(loader: Loader) -> BatchLoader:
    if not isinstance(loader, BatchLoader):
        raise UserError("deepmoe teach works for data held in memory: CIFAR and digits")
    return loader


def _looks(loader: ViewLoader, info: DataInfo) -> str:
    """How images are looked at, how many are held out, and which classes they are of."""
    augment = loader.augment
    looks = None if augment is None else [augment.mirror, augment.crop_padding, augment.holdout]
    return json.dumps([looks, list(info.class_names)])


def fingerprints(split: Split) -> Tensor:
    """A number for each image and its label, by which it is found again elsewhere."""
    images = split.images.cpu().contiguous().numpy()
    found = [hashlib.blake2b(image.tobytes(), digest_size=7).digest() for image in images]
    numbers = torch.tensor([int.from_bytes(digest, "big") for digest in found])
    return numbers ^ split.labels.cpu()


def _find(wanted: Tensor, known: Tensor) -> Tensor:
    """Where each number stands among those that are known; -1 for others."""
    if known.dtype != torch.int64 or known.dim() != 1 or not len(known):
        return torch.full_like(wanted, -1)
    ordered, places = known.sort()
    at = torch.searchsorted(ordered, wanted).clamp_max(len(ordered) - 1)
    return torch.where(ordered[at] == wanted, places[at], -1)


def only_lessons(paths: Sequence[str]) -> str | None:
    """The one file of lessons that a run learns from; `None` where it has teachers, or none.

    Raises:
        UserError: for lessons together with anything else.
    """
    found = [path for path in paths if is_lessons(path)]
    if found and len(paths) > 1:
        raise UserError(f"{found[0]} holds cached teachers: a run takes that file and no others")
    return found[0] if found else None
