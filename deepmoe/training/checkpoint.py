"""Checkpoints: one safetensors file with weights, optimiser state, configuration and progress."""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from deepmoe.config import RunConfig, config_to_dict
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.files import write_atomically
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE
from deepmoe.registry import model_from_config
from deepmoe.structure import structured
from deepmoe.training.state import TrainState

FORMAT = "deepmoe"
FORMAT_VERSION = 1
LAST_NAME = "last.safetensors"
BEST_NAME = "best.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A trained model with all that is needed to use it or to go on training it."""

    model: DeepMoE
    config: RunConfig
    info: DataInfo
    state: TrainState
    optimizer_state: dict[str, dict[str, Tensor]]  # by parameter name


def save_checkpoint(
    path: str | Path,
    model: DeepMoE,
    config: RunConfig,
    info: DataInfo,
    state: TrainState,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Writes a checkpoint; whoever kills the process finds either the old file or the new one."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{key}.{name}"] = value
    header = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "config": json.dumps(config_to_dict(config)),
        "data": json.dumps(dataclasses.asdict(info)),
        "state": json.dumps(dataclasses.asdict(state)),
    }
    content = save({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, header)
    write_atomically(Path(path), content)


class CheckpointStore:
    """The checkpoints of a run's folder: the last, the newest few of finished epochs, the best.

    Args:
        folder: of the run.
        keep: how many of the finished epochs to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.last = folder / LAST_NAME
        self.best = folder / BEST_NAME

    def keep_epoch(self, epoch: int, *, is_best: bool) -> None:
        """Gives the last checkpoint the name of its epoch, drops old ones, notes the best."""
        if is_best:
            _link(self.last, self.best)
        if self.keep:
            _link(self.last, self.folder / f"epoch-{epoch:04d}.safetensors")
        for old in self.epochs()[: -self.keep or None]:
            old.unlink()

    def epochs(self) -> list[Path]:
        """Checkpoints of finished epochs, oldest first."""
        return sorted(self.folder.glob("epoch-*.safetensors"))

    def clear(self) -> None:
        """Removes all checkpoints."""
        for path in [self.last, self.best, *self.epochs()]:
            path.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    """Makes a second name for a file that is never changed in place; a copy where that fails."""
    draft = target.with_name(f"{target.name}.tmp")
    try:
        draft.unlink(missing_ok=True)
        try:
            os.link(source, draft)
        except OSError:
            shutil.copyfile(source, draft)
        draft.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Reads a checkpoint and rebuilds its model, in evaluation mode.

    Raises:
        UserError: where the file is missing, damaged, not ours, or from a later format.
    """
    header, tensors = _read(Path(path))
    config, info, state = _parse_header(path, header)
    with torch.device("meta"):
        model = model_from_config(config, info.classes)
    weights = _with_prefix(tensors, "model.")
    model.codebook = _empty_codebook(model, weights)
    if model.gated and "thresholds" in weights:
        model.thresholds = torch.zeros(sum(model.backbone.gate_widths))
    if config.train.precision == "64-true":
        model.double()
    optimizer_state: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in _with_prefix(tensors, "optimizer.").items():
        key, _, name = full_name.partition(".")
        optimizer_state.setdefault(name, {})[key] = tensor
    if not _fits(model, weights, optimizer_state):
        raise UserError(f"checkpoint {path} does not fit its own model {config.model.name}")
    model.load_state_dict(weights, assign=True)
    return Checkpoint(model.to(device).eval(), config, info, state, optimizer_state)


def read_progress(path: str | Path) -> tuple[RunConfig, TrainState]:
    """What a checkpoint is of, and how far it is, without its weights.

    Raises:
        UserError: as `load_checkpoint` does.
    """
    header, _ = _read(Path(path), weights=False)
    config, _, state = _parse_header(path, header)
    return config, state


def _read(path: Path, *, weights: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = file.keys() if weights else ()
            return header, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise UserError(f"checkpoint {path} is damaged, or not a safetensors file") from error


def _parse_header(
    path: str | Path, header: dict[str, str]
) -> tuple[RunConfig, DataInfo, TrainState]:
    if header.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not a deepmoe checkpoint")
    version = header.get("format_version", "")
    if version != str(FORMAT_VERSION):
        raise UserError(
            f"checkpoint {path} has format version {version or 'none'}; "
            f"this deepmoe reads version {FORMAT_VERSION}"
        )
    try:
        config = structured(json.loads(header["config"]), RunConfig)
        info = structured(json.loads(header["data"]), DataInfo)
        state = structured(json.loads(header["state"]), TrainState)
        if not 0 <= state.epoch <= config.train.total_epochs:
            raise UserError(f"{state.epoch} finished epochs of {config.train.total_epochs}")
        return config, info, state
    except (KeyError, ValueError, RecursionError) as error:
        raise UserError(f"checkpoint {path} has a damaged header: {error}") from error


def _empty_codebook(model: DeepMoE, weights: dict[str, Tensor]) -> RouteCodebook | None:
    """A codebook of as many codes as were saved; `None` where there is none that could fit."""
    saved = weights.get("codebook.codes")
    if not model.gated or saved is None or saved.dim() != 2 or not len(saved):
        return None
    widths = model.backbone.gate_widths
    return RouteCodebook(torch.zeros(len(saved), sum(widths)), torch.zeros(sum(widths)), widths)


def _fits(
    model: DeepMoE, weights: dict[str, Tensor], optimizer_state: dict[str, dict[str, Tensor]]
) -> bool:
    def kinds(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    parameters = kinds(dict(model.named_parameters()))
    return kinds(weights) == kinds(model.state_dict()) and all(
        (value.shape, value.dtype) == parameters.get(name)
        for name, values in optimizer_state.items()
        for value in values.values()
    )


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
