"""Checkpoints: one safetensors file with weights, optimiser state, configuration and progress."""

import copy
import dataclasses
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from deepmoe.checkpoint_versions import check_gates, renamed
from deepmoe.config import GIVEN, ModelConfig, RunConfig, config_from_dict, config_to_dict
from deepmoe.configured_models import check_precision, model_from_config
from deepmoe.data import DataInfo
from deepmoe.devices import choose_device
from deepmoe.errors import UserError, reason
from deepmoe.files import write_atomically
from deepmoe.layers import GateHeads, NoisyTopKHeads, RouteCodebook
from deepmoe.model import DeepMoE
from deepmoe.registry import list_models
from deepmoe.schema import from_plain
from deepmoe.sources import is_source, make_network
from deepmoe.widening import widen

FORMAT = "deepmoe"
FORMAT_VERSION = 3  # since 2 with a checksum, since 3 with other names; all are read
LAST_NAME = "last.safetensors"
BEST_NAME = "best.safetensors"
MODEL, OPTIMIZER = "model.", "optimizer."  # what tensors are named after
DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64}  # what models consist of


@dataclass(frozen=True)
class TrainState:
    """How far a run is: all that training needs besides tensors to go on."""

    epoch: int = 0  # finished epochs, over both stages
    batch: int = 0  # finished batches of the epoch after them
    sums: tuple[float, ...] = ()  # of that epoch's losses and counts so far
    best: float | None = None  # best accuracy so far
    is_best: bool = False  # whether it is that of the last finished epoch
    budget_met: bool = False  # whether the epoch after them has met the compute budget, too
    metrics: tuple[dict[str, Any], ...] = ()  # of epochs since the checkpoint before

    def check(self, total_epochs: int) -> None:
        """Raises a UserError for a state that no run can be in."""
        numbers = (*self.sums, 0.0 if self.best is None else self.best)
        named = all(isinstance(line.get("epoch"), int) for line in self.metrics)
        inside = 0 <= self.epoch < total_epochs or (self.epoch == total_epochs and not self.batch)
        # The last of the sums counts batches, in each process.
        counted = 0 <= self.batch <= (self.sums[-1] if self.sums else 0)
        if not (inside and counted and named and all(map(math.isfinite, numbers))):
            raise UserError(
                f"no run of {total_epochs} epochs can be {self.epoch} epochs "
                f"and {self.batch} batches along"
            )


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
    """Writes a checkpoint; whoever kills the process finds either the old file or the new one.

    Raises:
        UserError: where the file can't be written, the model is in half precision, or its exits
            are no numbers.
    """
    check_precision(model)
    tensors = {MODEL + name: tensor for name, tensor in model.state_dict().items()}
    if model.exit_at is None:  # exits are switched off: there is nothing to vote on
        tensors.pop(f"{MODEL}exit_vote", None)
    for name in ("exit_at", "exit_vote"):
        if (value := tensors.get(MODEL + name)) is not None:
            if value.numel() != 1:
                raise UserError(f"{name} is one number for all images, not {value.numel()}")
            # Whoever sets one may not think of the model's precision, which is read again.
            tensors[MODEL + name] = value.reshape(()).to(next(model.parameters()).dtype)
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{OPTIMIZER}{key}.{name}"] = value
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "config": json.dumps(config_to_dict(config)),
        "data": json.dumps(dataclasses.asdict(info)),
        "state": json.dumps(dataclasses.asdict(state)),
    }
    header["checksum"] = _checksum(header, tensors)
    write_atomically(Path(path), save(tensors, header))


def load_checkpoint(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    network: str | nn.Module | None = None,
) -> Checkpoint:
    """Reads a checkpoint and rebuilds its model, in evaluation mode.

    Nothing is allocated before the file is known to hold what its header says, and nothing is
    imported because a file says so.

    Args:
        path: of the file.
        device: to put the model on.
        network: where the base network is not the zoo's own, the name it was made by, or such a
            network itself.

    Raises:
        UserError: where the base network is not the zoo's own and not named, or the file is
            missing, damaged, not ours, from a later format, or has weights that are not finite.
    """
    device, file = choose_device(device), _File(path)
    config, info, state = file.parse(used=True)
    try:
        check_gates(file.version, config.model)
    except UserError as error:
        raise UserError(f"checkpoint {path} can't be used: {error}") from error
    made = _own_network(config.model.name, network, path)
    try:
        model = _empty_model(config, info, made)
        shapes = renamed(file.shapes, file.version, config.model)
        others = config.model.name not in list_models()
        if others and config.model.wide != 1 and not _fits(file, shapes, model):
            model = widen(model, config.model.wide, noise=0)  # one that was given before it was
    except UserError as error:
        raise UserError(f"checkpoint {path} does not fit its network: {error}") from error
    if not _fits(file, shapes, model):
        raise UserError(f"checkpoint {path} does not fit its own model {config.model.name}")
    tensors = renamed(file.read(), file.version, config.model)
    weights = _ungrouped(_with_prefix(tensors, MODEL), file.heads_group, model)
    if "codebook.codes" in weights:
        codes, weight = weights["codebook.codes"], weights["codebook.weight"]
        model.codebook = RouteCodebook(codes, weight, model.gating.widths)
    for buffer in ("exit_at", "exit_vote", "thresholds"):
        if buffer in weights:
            setattr(model, buffer, torch.empty_like(weights[buffer], device="meta"))
    # Some modules ask which version of theirs has written their tensors: this one.
    model.load_state_dict(_with_versions(weights, model), assign=True)
    try:
        model.check_finite()
        if model.exit_at is not None and float(model.exit_at) < 0:
            raise UserError("exit_at is negative, and no confidence is")
        if model.exit_vote is not None and not 0 <= float(model.exit_vote) <= 1:
            raise UserError("exit_vote is not from 0 to 1")
    except UserError as error:
        raise UserError(f"checkpoint {path}: {error}") from error
    optimizer_state: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in _with_prefix(tensors, OPTIMIZER).items():
        key, _, name = full_name.partition(".")
        optimizer_state.setdefault(name, {})[key] = tensor
    return Checkpoint(model.to(device).eval(), config, info, state, optimizer_state)


def _empty_model(config: RunConfig, info: DataInfo, network: nn.Module | None) -> DeepMoE:
    """What a checkpoint is to fill; without weights, but for a network that is there already."""
    if config.model.name not in list_models():  # what others make is not made wide
        plain = dataclasses.replace(config.model, wide=1.0)
        config = dataclasses.replace(config, model=plain)
    with torch.device("meta"):
        model = model_from_config(
            config, info.classes, size=info.size, network=network, weights=False
        )
    return model.double() if config.train.precision == "64-true" else model


def _own_network(name: str, given: str | nn.Module | None, path: str | Path) -> nn.Module | None:
    """The module to fill, if one is given; what a file names is made only if the user names it."""
    if isinstance(given, nn.Module):
        return copy.deepcopy(given)
    if is_source(name) and given != name:
        raise UserError(
            f"the network of {path} is made by {name}, which runs only if you name it: "
            f"--network {name}, or load_checkpoint(..., network={name!r})"
        )
    if name == GIVEN and isinstance(given, str) and is_source(given):
        return make_network(given, None, pretrained=False)
    if name == GIVEN:
        raise UserError(
            f"the network of {path} was given as a module: give one like it, by "
            "load_checkpoint(..., network=module), or name what makes it"
        )
    if given not in (None, name):
        raise UserError(f"the network of {path} is {name}, not {given}")
    return None


def read_network(path: str | Path) -> str:
    """The name of what a checkpoint's base network is made by."""
    return read_model(path).name


def read_model(path: str | Path) -> ModelConfig:
    """What a checkpoint's base network is, without its weights."""
    return _File(path).parse(used=True)[0].model


def read_info(path: str | Path) -> DataInfo:
    """What a checkpoint was trained on, without its weights."""
    return _File(path).parse(used=True)[1]


def read_checksum(path: str | Path) -> str:
    """What tells a checkpoint from all others; those of the first format have none."""
    return _File(path).header.get("checksum", "")


def read_progress(path: str | Path) -> tuple[RunConfig, TrainState]:
    """What a checkpoint is of, and how far it is, without its weights.

    Raises:
        UserError: as `load_checkpoint` does, and for settings of training that are gone.
    """
    config, _, state = _File(path).parse(used=False)
    return config, state


class _File:
    """A checkpoint's file: its header, the shapes of its tensors, and on demand these."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path):
            raise UserError(f"a checkpoint is given by its path, not by a {type(path).__name__}")
        try:
            there = (path := Path(path)).is_file()
        except OSError as error:  # such as for a name that is too long
            raise UserError(f"no checkpoint at {path}: {reason(error)}") from error
        if not there:
            raise UserError(f"no checkpoint at {path}")
        self.path = path
        try:
            path.open("rb").close()  # safetensors takes what it may not read for missing
            with safe_open(path, framework="pt") as file:
                self.header: dict[str, str] = file.metadata() or {}
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self.shapes = {
                    name: (torch.Size(s.get_shape()), DTYPES.get(s.get_dtype()))
                    for name, s in slices.items()
                }
        except PermissionError as error:
            raise UserError(f"cannot read checkpoint {path}: {reason(error)}") from error
        except (SafetensorError, OSError) as error:
            raise UserError(f"checkpoint {path} is damaged, or not a safetensors file") from error
        if self.header.get("format") != FORMAT:
            raise UserError(f"{path} is a safetensors file, but not a deepmoe checkpoint")
        version = self.header.get("format_version", "")
        if version not in map(str, range(1, FORMAT_VERSION + 1)):
            raise UserError(
                f"checkpoint {path} has format version {version or 'none'}; "
                f"this deepmoe reads up to version {FORMAT_VERSION}"
            )
        self.version = int(version)

    def parse(self, *, used: bool) -> tuple[RunConfig, DataInfo, TrainState]:
        """The header as what it stands for; `used` as in `config_from_dict`."""
        try:
            values = json.loads(self.header["config"])
            if not isinstance(values, dict):
                raise TypeError("the configuration is no table")
            config = config_from_dict(values, used=used)
            info = from_plain(json.loads(self.header["data"]), DataInfo)
            state = from_plain(json.loads(self.header["state"]), TrainState)
            state.check(config.train.total_epochs)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise UserError(f"checkpoint {self.path} has a damaged header: {why}") from error
        group = values.get("heads", {}).get("group", 1)  # version 1: channels that share a gate
        self.heads_group = group if isinstance(group, int) and group > 0 else 1
        return config, info, state

    def read(self) -> dict[str, Tensor]:
        """All tensors, as they were saved."""
        try:
            with safe_open(self.path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in self.shapes}
        except (SafetensorError, OSError) as error:
            raise UserError(f"checkpoint {self.path} is damaged") from error
        header = {key: value for key, value in self.header.items() if key != "checksum"}
        if self.version > 1 and self.header.get("checksum") != _checksum(header, tensors):
            raise UserError(f"checkpoint {self.path} is damaged: its checksum does not match")
        return tensors


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _fits(file: _File, shapes: Mapping[str, Any], model: DeepMoE) -> bool:
    """Whether these are shapes of the model's tensors, and of an optimiser's for parameters."""
    widths = model.gating.widths
    dtype = next(model.parameters()).dtype
    expected = {
        name: (tensor.shape, tensor.dtype)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    if isinstance(model.heads, GateHeads | NoisyTopKHeads) and file.heads_group > 1:
        rows = sum(-(-width // file.heads_group) for width in widths)
        expected["heads.weight"] = (torch.Size((rows, model.heads.weight.shape[1])), dtype)
    parameters = {name: expected[name] for name, _ in model.named_parameters()}
    found = _with_prefix(shapes, MODEL)
    if model.embedding is not None and "exit_at" in found:
        expected["exit_at"] = (torch.Size(()), dtype)
        if "exit_vote" in found:
            expected["exit_vote"] = (torch.Size(()), dtype)
    ahead = model.gated and not model.on_the_way
    if ahead and "thresholds" in found:
        expected["thresholds"] = (torch.Size((sum(widths),)), dtype)
    if ahead and "codebook.codes" in found:
        codes = found["codebook.codes"][0]
        if len(codes) == 2 and codes[0]:
            expected["codebook.codes"] = (torch.Size((codes[0], sum(widths))), dtype)
            expected["codebook.weight"] = (torch.Size((sum(widths),)), dtype)
    moments = _with_prefix(shapes, OPTIMIZER)
    return found == expected and all(
        shape == parameters.get(name.partition(".")[2]) for name, shape in moments.items()
    )


def _ungrouped(weights: dict[str, Tensor], group: int, model: DeepMoE) -> dict[str, Tensor]:
    """Version 1 had gates for several neighbouring channels: each gets one of its own, the same."""
    if group == 1 or not isinstance(model.heads, GateHeads | NoisyTopKHeads):
        return weights
    widths = model.gating.widths
    rows = weights["heads.weight"].split([-(-width // group) for width in widths])
    each = [r.repeat_interleave(min(group, w), 0)[:w] for r, w in zip(rows, widths, strict=True)]
    return {**weights, "heads.weight": torch.cat(each)}


def _with_versions(weights: Mapping[str, Tensor], model: DeepMoE) -> OrderedDict[str, Tensor]:
    versioned = OrderedDict(weights)
    versioned._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    return versioned


def _with_prefix(found: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {n.removeprefix(prefix): v for n, v in found.items() if n.startswith(prefix)}
