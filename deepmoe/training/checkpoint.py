"""Checkpoints: one safetensors file with weights, optimiser state, configuration and progress."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from deepmoe.config import RunConfig, config_from_dict, config_to_dict
from deepmoe.data.dataset import ImageInfo
from deepmoe.errors import UserError
from deepmoe.model import DeepMoE
from deepmoe.registry import model_from_config

FORMAT = "deepmoe"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A trained model with all that is needed to use it or to go on training it."""

    model: DeepMoE
    config: RunConfig
    info: ImageInfo
    epoch: int  # finished epochs, over both stages
    optimizer_state: dict[str, dict[str, Tensor]]  # by parameter name


def save_checkpoint(
    path: str | Path,
    model: DeepMoE,
    config: RunConfig,
    info: ImageInfo,
    *,
    epoch: int,
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
        "epoch": str(epoch),
    }
    content = save({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, header)
    write_atomically(Path(path), content)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file in one step, after the new content has reached the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Reads a checkpoint and rebuilds its model, in evaluation mode.

    Raises:
        UserError: where the file is missing, damaged, not ours, or from a later format.
    """
    header, tensors = _read(Path(path))
    config, info, epoch = _parse_header(path, header)
    with torch.device("meta"):
        model = model_from_config(config, info.classes)
    weights = _with_prefix(tensors, "model.")
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"checkpoint {path} does not fit its own model {config.model.name}"
        ) from error
    optimizer_state: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in _with_prefix(tensors, "optimizer.").items():
        key, _, name = full_name.partition(".")
        optimizer_state.setdefault(name, {})[key] = tensor
    return Checkpoint(model.to(device).eval(), config, info, epoch, optimizer_state)


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"checkpoint {path} is damaged, or not a safetensors file") from error


def _parse_header(path: str | Path, header: dict[str, str]) -> tuple[RunConfig, ImageInfo, int]:
    if header.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not a deepmoe checkpoint")
    version = header.get("format_version", "")
    if version != str(FORMAT_VERSION):
        raise UserError(
            f"checkpoint {path} has format version {version or 'none'}; "
            f"this deepmoe reads version {FORMAT_VERSION}"
        )
    try:
        config = config_from_dict(json.loads(header["config"]))
        data: dict[str, Any] = json.loads(header["data"])
        info = ImageInfo(**{key: tuple(value) for key, value in data.items()})
        return config, info, int(header["epoch"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"checkpoint {path} has a damaged header: {error}") from error


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
