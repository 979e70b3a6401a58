"""The scales that a table or figure of the paper can be made at: how long its networks train."""

from dataclasses import dataclass
from typing import Any

from deepmoe.errors import UserError
from deepmoe.schema import suggest

FULL, SHORT, SMOKE = "full", "short", "smoke"
Settings = dict[str, Any]

# Of all runs. Figures are those of the last epoch, so that nothing is evaluated on the way.
COMMON: Settings = {
    "train.evaluate_epochs": 1000,
    "train.checkpoint_epochs": 20,
    "train.keep_checkpoints": 0,
}
# What a scale changes of the presets with the paper's schedules, by the kind of data.
_SHORT: dict[str, Settings] = {
    "cifar": {
        "train.epochs": 5,
        "train.finetune_epochs": 1,
        "train.batch_size": 256,
        "train.lr": 0.1,
        "train.schedule": "long-cycle",
        "train.nesterov": True,
        "train.weight_decay": 5e-4,
    },
    "imagenet": {
        "train.epochs": 20,
        "train.batch_size": 64,
        "train.lr": 0.1,
        "train.schedule": "long-cycle",
        "train.nesterov": True,
        "train.weight_decay": 5e-4,
    },
    "segmentation": {
        "data.name": "segmentation-pairs",
        "data.crop": (240, 320),
        "data.scale": (0.5, 2.0),
        "data.workers": 6,
        "train.epochs": 30,
        "train.batch_size": 16,
        "train.lr": 0.05,
        "train.schedule": "long-cycle",
        "train.nesterov": True,
        "train.weight_decay": 5e-4,
    },
}
_TINY: Settings = {
    "embedding.widths": (4, 8),
    "data.workers": 0,
    "train.epochs": 1,
    "train.finetune_epochs": 1,
    "train.batch_size": 50,
    "train.lr": 0.01,
    "train.device": "cpu",
}
_SMOKE: dict[str, Settings] = {
    "cifar": {**_SHORT["cifar"], **_TINY},
    "imagenet": {**_SHORT["imagenet"], **_TINY, "data.size": 32},
    "segmentation": {**_SHORT["segmentation"], **_TINY, "data.crop": (16, 24), "data.shift": 4},
}


@dataclass(frozen=True)
class Scale:
    """How much is spent on a table or figure.

    Attributes:
        name: on the command line.
        settings: what it changes of the paper's schedule, by the kind of data.
        most_seeds: of a run.
        teachers: seeds of the networks that our own recipe learns from.
        views: of each training image that teachers look at once, for all runs, where images lie in
            memory; `None` where they look at every batch.
        thin: whether networks are a fraction of their own widths, and data may be made up.
    """

    name: str
    settings: dict[str, Settings]
    most_seeds: int = 3
    teachers: tuple[int, ...] = (0, 1, 2)
    views: int | None = None
    thin: bool = False

    def epochs(self, kind: str) -> int | None:
        """That every run on this kind of data trains; `None` where the paper's schedule says."""
        schedule = self.settings[kind]
        if not schedule:
            return None
        return schedule["train.epochs"] + schedule.get("train.finetune_epochs", 0)


SCALES = {
    FULL: Scale(FULL, {kind: {} for kind in _SHORT}),
    SHORT: Scale(SHORT, _SHORT, views=6),
    SMOKE: Scale(SMOKE, _SMOKE, most_seeds=1, teachers=(0,), views=2, thin=True),
}


def scale_named(name: str) -> Scale:
    """The scale of this name.

    Raises:
        UserError: where there is none.
    """
    if name not in SCALES:
        there = ", ".join(SCALES)
        raise UserError(f"no scale is named {name!r}{suggest(name, SCALES)}; there are {there}")
    return SCALES[name]
