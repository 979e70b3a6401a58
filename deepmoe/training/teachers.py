"""Trained networks that a run learns from."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from deepmoe.checkpoint import Checkpoint, load_checkpoint, read_network
from deepmoe.config import GIVEN, RunConfig
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.model import DeepMoE
from deepmoe.sources import is_source


class Teachers(nn.Module):
    """Trained networks that answer together.

    Args:
        networks: one or several.
    """

    def __init__(self, networks: Sequence[DeepMoE]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Returns the mean of their logits: the geometric mean of what they hold likely."""
        with torch.no_grad():
            return torch.stack([network(x_BCHW).logits for network in self.networks]).mean(dim=0)


def load_teachers(model: DeepMoE, info: DataInfo, config: RunConfig) -> Teachers | None:
    """The run's teachers, on the device of the model to train; `None` if it has none.

    Raises:
        UserError: for one that tells other classes apart, or knows held-out images.
    """
    parameter, networks = next(model.parameters()), []
    for path in config.train.teachers:
        trained = load_trained("train.teacher", path, model, info, config)
        check_teacher(path, trained, info, config)
        networks.append(beside(trained.model.to(parameter.dtype), parameter.device))
    return Teachers(networks).requires_grad_(False).eval() if networks else None


def beside(network: DeepMoE, device: torch.device) -> DeepMoE:
    """A teacher on a device, in the memory format that is fast there."""
    network.to(device)
    if device.type == "cuda":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def load_trained(
    key: str, path: str, model: DeepMoE, info: DataInfo, config: RunConfig
) -> Checkpoint:
    """The checkpoint that a setting of a run names.

    Args:
        key: the setting.
        path: of the checkpoint. Its network is of the zoo, or made as the run's own is.
        model: of the run.
        info: of its data.
        config: of the run.

    Raises:
        UserError: where it is missing, damaged, or has learnt from images that are held out here.
    """
    if not Path(path).is_file():
        raise UserError(f"{key}: no checkpoint at {path}; train that network first")
    # What this run's own network is made by may be run for others, too.
    own = config.model.name
    by_name = own if is_source(own) else None
    same = read_network(path) == own
    made = model.one_network if own == GIVEN else by_name
    trained = load_checkpoint(path, network=made if same else None)
    _check_held_out(path, trained, info, config)
    return trained


def check_teacher(path: str | Path, trained: Checkpoint, info: DataInfo, config: RunConfig) -> None:
    """Refuses a teacher that tells other classes apart, or knows images that are held out here."""
    if trained.info.class_names != info.class_names:
        raise UserError(f"{path} was trained on other classes: its labels have other names")
    _check_held_out(path, trained, info, config)


def _check_held_out(
    path: str | Path, trained: Checkpoint, info: DataInfo, config: RunConfig
) -> None:
    same_data = trained.config.data.name == config.data.name
    same_data = same_data and trained.info.class_names == info.class_names
    holdout = config.data.holdout
    if holdout and same_data and trained.config.data.holdout != holdout:
        raise UserError(
            f"{path} was trained on images that are held out here: "
            f"train it with data.holdout={holdout}, too"
        )
