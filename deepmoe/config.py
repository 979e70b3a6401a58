"""Run configuration: frozen dataclasses, TOML presets, dotted overrides. No torch here."""

import dataclasses
import difflib
import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import cattrs
import tomli_w

from deepmoe.errors import UserError

Schedule = float | tuple[tuple[float, float], ...]
"""A constant, or points (epoch, value) joined by straight lines and held flat at both ends."""


@dataclass(frozen=True)
class ModelConfig:
    """The base network. `None` leaves an option at the model's own default."""

    name: str = "resnet20"
    classes: int | None = None  # None: as many as the data has
    wide: float = 1.0
    widths: str | tuple[int, ...] | None = None
    block: Literal["basic", "bottleneck-a", "bottleneck-b"] | None = None
    gates: Literal["inner", "all", "none"] = "inner"  # none: the dense twin
    gate_last: bool | None = None


@dataclass(frozen=True)
class EmbeddingConfig:
    """The shallow embedding network."""

    form: Literal["classes", "latent"] = "classes"
    dim: int = 32  # of the `latent` form
    widths: tuple[int, ...] | None = None  # None: the model's own default
    temperature: tuple[float, float] | None = None  # random softmax temperature in training


@dataclass(frozen=True)
class HeadsConfig:
    """The gate heads."""

    kind: Literal["relu", "noisy-topk"] = "relu"
    init: str | None = None  # ones, uniform(a, b) or normal(m, s); None: the kind's own default
    share: float = 0.5  # of a layer's channels that noisy top-k keeps


@dataclass(frozen=True)
class DataConfig:
    """The data set and its augmentation."""

    name: Literal[
        "digits", "cifar10", "cifar100", "image-folder", "segmentation-pairs", "cityscapes"
    ] = "digits"
    root: str = "data"  # folder, or for files of images a zip of it
    size: int | None = None  # pixels a side, where there is a choice: digits, image-folder
    holdout: int = 0  # training images set aside to choose recipes on, instead of the test set
    mirror: bool = True
    crop_padding: int = 4  # of small images
    resize: int = 256  # image-folder: shorter side before the centre crop of evaluation
    min_area: float = 0.08  # image-folder: smallest share of an image that a random crop takes
    color_jitter: float = 0.4  # image-folder: of brightness, contrast and saturation
    lighting: float = 0.1  # image-folder: strength of PCA lighting
    crop: tuple[int, int] | None = None  # segmentation: height and width of the random crop
    scale: tuple[float, float] = (1.0, 1.0)  # segmentation: range of random scaling
    shift: int = 0  # segmentation: how many pixels a crop may reach beyond the image
    workers: int = 4  # processes that decode image files
    unreadable_limit: float = 0.01  # share of files that may be skipped before the run stops


@dataclass(frozen=True)
class LossConfig:
    """Weights of the objective's parts; both weights are zero in the fine-tune stage."""

    sparsity: Schedule = 0.0  # lambda
    l1: Literal["sum", "mean"] = "sum"
    embedding: Schedule = 1.0  # mu
    balance: float = 0.0  # load balancing for noisy top-k
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """Both stages of training."""

    epochs: int = 30  # joint stage
    finetune_epochs: int = 0  # frozen stage
    batch_size: int = 128
    lr: float = 0.1
    schedule: Literal["one-cycle", "step", "constant"] = "one-cycle"
    milestones: tuple[int, ...] = ()  # of `step`, in epochs over both stages
    lr_decay: float = 0.1  # of `step`
    warmup: float = 0.2  # of `one-cycle`: share of the joint stage in which the rate rises
    finetune_lr: float = 0.01  # of `one-cycle`: where the frozen stage's decay starts
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    seed: int = 0
    target_macs: float | None = None  # budget: share of the dense MACs (up to 1), or a number
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"  # auto: bf16-mixed on CUDA
    compile: Literal["auto", "on", "off"] = "auto"  # auto: on CUDA
    sync_bn: bool = False  # batch norm over the whole batch, not over each device's part
    loss_limit: float = 1000.0  # a task loss above it, or NaN, stops the run
    checkpoint_epochs: int = 1  # a checkpoint every so many epochs, and at the end
    checkpoint_minutes: float = 10.0  # and within an epoch after so many minutes
    keep_checkpoints: int = 2  # newest ones of finished epochs; the best is kept besides
    tensorboard: bool = False


@dataclass(frozen=True)
class RunConfig:
    """Everything one training run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        positive = {
            "model.wide": self.model.wide,
            "train.batch_size": self.train.batch_size,
            "train.epochs": self.train.epochs,
            "train.lr": self.train.lr,
            "train.loss_limit": self.train.loss_limit,
            "train.checkpoint_epochs": self.train.checkpoint_epochs,
            "train.checkpoint_minutes": self.train.checkpoint_minutes,
            "embedding.dim": self.embedding.dim,
            "data.min_area": self.data.min_area,
            "data.scale": min(self.data.scale),
        }
        if self.train.target_macs is not None:
            positive["train.target_macs"] = self.train.target_macs
        not_negative = {
            "train.finetune_epochs": self.train.finetune_epochs,
            "train.finetune_lr": self.train.finetune_lr,
            "train.weight_decay": self.train.weight_decay,
            "train.momentum": self.train.momentum,
            "data.holdout": self.data.holdout,
            "data.crop_padding": self.data.crop_padding,
            "data.workers": self.data.workers,
            "data.color_jitter": self.data.color_jitter,
            "data.lighting": self.data.lighting,
            "data.shift": self.data.shift,
            "data.unreadable_limit": self.data.unreadable_limit,
            "train.keep_checkpoints": self.train.keep_checkpoints,
            "loss.balance": self.loss.balance,
        }
        for key, value in positive.items():
            if not value > 0:
                raise UserError(f"{key} must be above 0, not {value}")
        for key, value in not_negative.items():
            if not value >= 0:
                raise UserError(f"{key} must not be negative, but is {value}")
        for key, value in {
            "heads.share": self.heads.share,
            "train.warmup": self.train.warmup,
        }.items():
            if not 0 < value <= 1:
                raise UserError(f"{key} must lie above 0 and at most at 1, not {value}")

    @property
    def dense(self) -> "RunConfig":
        """The same run without gates: the dense twin."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, gates="none"))


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    files = resources.files("deepmoe").joinpath("presets").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load_config(preset: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a preset by name, or a TOML file by path, and applies `key.path=value` overrides.

    Args:
        preset: a name from `preset_names()`, or a path that ends in `.toml`.
        overrides: strings such as `train.lr=0.05`; the value is read as TOML, else as a string.

    Raises:
        UserError: for an unknown preset or key, or a value of the wrong type.
    """
    values = _read_preset(preset)
    base = values.pop("extends", None)
    if base is not None:
        parent = _read_preset(base)
        if "extends" in parent:
            raise UserError(f"preset {preset} extends {base}, which itself extends another preset")
        values = _merge(parent, values)
    return config_from_dict(_override(values, overrides))


def apply_overrides(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """A configuration with `key.path=value` overrides applied."""
    return config_from_dict(_override(config_to_dict(config), overrides))


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Builds a RunConfig from nested plain values; rejects unknown keys and wrong types."""
    _check_keys(RunConfig, values, prefix="")
    try:
        return _CONVERTER.structure(values, RunConfig)
    except cattrs.BaseValidationError as error:
        problem = cattrs.transform_error(error, path="", format_exception=_describe)[0]
        message, _, path = problem.rpartition(" @ ")
        key = path.lstrip(".")
        raise UserError(f"config key {key}: {message}" if key else message) from error


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain values; options left at `None` are left out."""
    return _without_none(_CONVERTER.unstructure(config))


def config_to_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML, fit to be saved and loaded as a preset."""
    return tomli_w.dumps(config_to_dict(config))


def value_at(schedule: Schedule, epoch: float) -> float:
    """The value of a schedule at a (fractional) epoch."""
    if isinstance(schedule, int | float):
        return float(schedule)
    left = schedule[0]
    if epoch <= left[0]:
        return left[1]
    for right in schedule[1:]:
        if epoch <= right[0]:
            share = (epoch - left[0]) / (right[0] - left[0])
            return left[1] + share * (right[1] - left[1])
        left = right
    return left[1]


def _read_preset(preset: str | Path) -> dict[str, Any]:
    if str(preset).endswith(".toml"):
        path: Any = Path(preset)
    else:
        names = preset_names()
        if str(preset) not in names:
            raise UserError(
                f"no preset is named {str(preset)!r}{suggest(str(preset), names)}; "
                f"there are {', '.join(names)}, or give the path of a .toml file"
            )
        path = resources.files("deepmoe").joinpath("presets", f"{preset}.toml")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{preset} is not valid TOML: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read preset {preset}: {error.strerror}") from error


def _parse_override(item: str) -> dict[str, Any]:
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set takes key=value, such as train.lr=0.05, not {item!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return value


def _override(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    for item in overrides:
        values = _merge(values, _parse_override(item))
    return values


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _check_keys(cls: type, values: Any, prefix: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(values, Mapping):
        raise UserError(f"config key {prefix.rstrip('.')} is a table, not {values!r}")
    for key, value in values.items():
        if key not in fields:
            raise UserError(f"unknown config key {prefix}{key}{suggest(key, fields, prefix)}")
        kind = fields[key].type
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            _check_keys(kind, value, f"{prefix}{key}.")


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value


def _describe(error: BaseException, _kind: Any) -> str:
    return str(error) if isinstance(error, UserError) else f"invalid value ({error})"


def _strict(kind: type, accepted: tuple[type, ...]) -> Any:
    def structure(value: Any, _type: Any) -> Any:
        is_bool_by_mistake = isinstance(value, bool) and kind is not bool
        if not isinstance(value, accepted) or is_bool_by_mistake:
            raise UserError(f"expected {kind.__name__}, got {value!r}")
        return kind(value)

    return structure


def _structure_literal(value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if value not in choices:
        raise UserError(f"expected one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def _structure_widths(value: Any, _type: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not all(type(v) is int and v >= 0 for v in value):
        raise UserError(f"expected a name or a list of whole numbers, got {value!r}")
    return tuple(value)


def _structure_schedule(value: Any, _type: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        points = tuple((float(epoch), float(level)) for epoch, level in value)
    except (TypeError, ValueError):
        points = ()
    if not points or any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
        raise UserError(
            f"expected a number or points [[epoch, value], ...] of rising epochs, got {value!r}"
        )
    return points


def _structure_tuple(value: Any, kind: Any) -> Any:
    args = get_args(kind)
    many = args[-1] is Ellipsis
    if not isinstance(value, list | tuple) or not (many or len(value) == len(args)):
        raise UserError(f"expected a list{'' if many else f' of {len(args)}'}, got {value!r}")
    kinds = [args[0]] * len(value) if many else list(args)
    return tuple(_CONVERTER.structure(v, k) for v, k in zip(value, kinds, strict=True))


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    for kind, accepted in {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.items():
        converter.register_structure_hook(kind, _strict(kind, accepted))
    converter.register_structure_hook_func(lambda t: get_origin(t) is tuple, _structure_tuple)
    converter.register_structure_hook_func(lambda t: get_origin(t) is Literal, _structure_literal)
    converter.register_structure_hook_func(lambda t: t == Schedule, _structure_schedule)
    widths = str | tuple[int, ...] | None
    converter.register_structure_hook_func(
        lambda t: t == widths,
        lambda value, t: None if value is None else _structure_widths(value, t),
    )
    return converter


_CONVERTER = _make_converter()
