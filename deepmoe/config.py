"""Run configuration: frozen dataclasses, TOML presets, dotted overrides. No torch here."""

import dataclasses
import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w

from deepmoe.config_checks import check_config
from deepmoe.config_versions import SCHEMA, upgraded
from deepmoe.errors import UserError
from deepmoe.files import read_regular
from deepmoe.schema import Gates, Paths, Schedule, Widths, from_plain, suggest, to_plain

GIVEN: Literal["given"] = (
    "given"  # the name of a network, or of data, that was handed over in Python
)

# "run:dense" as a checkpoint: that of dense, of the same or its only seed; or "run:dense-seed0"
ANOTHER_RUN = "run:"
HeadsKind = Literal["relu", "noisy-topk", "scale", "fbs", "rnp"]
PruneBy = Literal[
    "taylor", "strength", "li", "li-greedy", "he", "thinet", "sss", "slimming", "depgraph"
]


@dataclass(frozen=True)
class ModelConfig:
    """The base network. What is unset is left at the model's own default."""

    # of the zoo, or timm:NAME, torchvision:NAME, hf:FOLDER_OR_ID, package.module:factory
    name: str = "resnet20"
    classes: int | None = None  # unset: as many as the data has
    pretrained: bool = False  # timm, torchvision, hf: start from trained weights
    wide: float = 1.0  # factor on the gated widths; in a VGG, on all widths
    widths: Widths | None = None  # the gated widths one by one, or a name such as w13-all
    # of residual networks: with gates after both inner convolutions (a), or after the 3x3 alone (b)
    block: Literal["basic", "bottleneck-a", "bottleneck-b"] | None = None
    gates: Gates = "inner"  # inside residual blocks, all, or named layers; none: the dense twin
    gate_last: bool | None = None  # VGG: gate the last convolution too, as in the paper
    # There is an embedding, also without gates: it may answer images itself (`deepmoe exits`).
    exits: bool = False
    kept: tuple[int, ...] | None = None  # channels that train.prune has left of each group
    # Hard MoE: so many copies of what train.start names, of which each image runs one.
    experts: int | None = None


@dataclass(frozen=True)
class EmbeddingConfig:
    """What looks at the image first: a shallow network, or a narrow one (`network`)."""

    # what its softmax is over: classes, or free mixture weights (latent); network: a narrow network
    form: Literal["classes", "latent", "network"] = "classes"
    dim: int = 32  # of the `latent` form: number of mixture weights
    widths: tuple[int, ...] | None = None  # of its convolutions; unset: the model's own default
    shrink: int = 1  # it looks at the mean of so many pixels by so many: 2 for large images
    task_gradient: bool = True  # false: it learns from its own loss alone, not through the gates
    # `network`: what is left of train.start at this share of the MACs looks first.
    prune: float | None = None
    kept: tuple[int, ...] | None = None  # channels that embedding.prune has left of each group


@dataclass(frozen=True)
class HeadsConfig:
    """The gate heads."""

    # relu, noisy-topk: from the embedding; fbs, rnp: from what each layer reads, without one;
    # scale: the same for all images, for train.prune_by = "sss"
    kind: HeadsKind = "relu"
    # how gates start, such as "split(0.72)"; see layers.heads.initialise. Unset: by kind, and
    # spread under a budget
    init: str | None = None
    share: float = 0.5  # of a layer's channels that noisy top-k and fbs keep
    # noisy-topk: what a layer's gates sum to, for each image: their number, so that a gate is one
    # on average, or one, as in the paper. Over hundreds of channels that leaves each too small
    # for the batch norm behind it.
    total: Literal["kept", "one"] = "kept"
    # fbs: of the first weights, in units of He's, which are the paper's. Small ones start as the
    # network itself does and choose much the same channels for all images, large ones differ more.
    spread: float = 0.1
    groups: int = 4  # rnp: groups of a layer's channels; an action runs the first few
    hidden: int = 32  # rnp: width of the agent's recurrent cell
    penalty: float = -0.1  # rnp: reward of a group beyond the first; a budget moves it
    lr_scale: float = 1.0  # their learning rate, in units of train.lr


@dataclass(frozen=True)
class DataConfig:
    """The data set and its augmentation."""

    # which data set, or which layout of files
    name: Literal[
        "digits",
        "cifar10",
        "cifar100",
        "image-folder",
        "segmentation-pairs",
        "cityscapes",
        "given",  # datasets that were handed to `fit`
    ] = "digits"
    root: str = "data"  # folder, or for files of images a zip of it
    size: int | None = None  # pixels a side, where there is a choice: digits, image-folder
    holdout: int = 0  # training images set aside to choose recipes on, instead of the test set
    mirror: bool = True  # mirror half of the training images
    crop_padding: int = 4  # small images: pixels around an image that a random crop may take
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

    sparsity: Schedule = 0.0  # lambda: weight of the gates' L1 norm
    l1: Literal["sum", "mean"] = "sum"  # of a layer's gates; mean divides by their number
    embedding: Schedule = 1.0  # mu: weight of the embedding's own classification loss
    balance: float = 0.0  # load balancing for noisy top-k
    agent: float = 1.0  # rnp: by which the task's loss counts in the agent's reward
    label_smoothing: float = 0.0  # share of a label that is spread over all classes
    distillation: float = 0.0  # share of the task's loss that compares with train.teacher
    distillation_temperature: float = 4.0  # both networks' logits are divided by it
    embedding_distillation: float = 0.0  # share of the embedding's own loss that compares with it
    norm_sparsity: float = 0.0  # L1 of batch norms' scales, for train.prune_by = "slimming"


@dataclass(frozen=True)
class TrainConfig:
    """Both stages of training."""

    epochs: int = 30  # of the joint stage; 0 to fine-tune alone what train.start has trained
    finetune_epochs: int = 0  # of the frozen stage
    batch_size: int = 128  # of all devices together
    lr: float = 0.1  # the highest learning rate
    # one-cycle: of the joint stage, and another fall in the frozen one; long-cycle: one over both
    schedule: Literal["one-cycle", "long-cycle", "step", "constant"] = "one-cycle"
    milestones: tuple[int, ...] = ()  # of `step`, in epochs over both stages
    lr_decay: float = 0.1  # of `step`: factor at each milestone
    warmup: float = 0.2  # of a cycle: share of it in which the rate rises
    finetune_lr: float = 0.01  # of `one-cycle`: where the frozen stage's decay starts
    momentum: float = 0.9  # of SGD
    nesterov: bool = False  # Nesterov's momentum
    weight_decay: float = 5e-4  # of all weights but the heads'
    seed: int = 0  # of first weights, order and crops
    # Checkpoint to start from: base network, and gates. From one without gates, new ones start
    # with the largest at its strongest channels.
    start: str | None = None
    # Share of the dense MACs to which the start's least important channels are removed, for good.
    prune: float | None = None
    prune_widths: tuple[int, ...] | None = None  # in its place: channels to leave of each group
    prune_by: PruneBy = "taylor"  # which channels go: a method of `deepmoe compare`
    # taylor, strength: 0 leaves the same share of every group, 1 goes by worth for each MAC alone.
    prune_tilt: float = 0.5
    # Checkpoints whose mean output is learnt from, or what `deepmoe teach` has written of it.
    teacher: Paths | None = None
    target_macs: float | None = None  # budget: share of the dense MACs (up to 1), or a number
    budget_ramp: tuple[float, float] = (
        0.1,
        0.6,
    )  # part of the joint stage in which the cost falls to the target
    channel_floor: float = 0.05  # share of each layer's channels that a budget leaves running
    codes: int | None = None  # frozen stage: gates come from a codebook of so many routes
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    # auto: bf16-mixed on CUDA
    precision: Literal["auto", "64-true", "32-true", "bf16-mixed"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"  # auto: on CUDA
    cuda_graphs: Literal["auto", "off"] = "auto"  # auto: on one CUDA device
    sync_bn: bool = False  # batch norm over the whole batch, not over each device's part
    loss_limit: float = 1000.0  # a task loss above it, or NaN, stops the run
    evaluate_epochs: int = 1  # an evaluation every so many epochs, and at the end
    checkpoint_epochs: int = 1  # a checkpoint every so many epochs, and at the end
    checkpoint_minutes: float = 10.0  # and within an epoch after so many minutes
    keep_checkpoints: int = 2  # newest ones of finished epochs; the best is kept besides
    tensorboard: bool = False  # also write metrics for TensorBoard

    @property
    def total_epochs(self) -> int:
        """Of both stages."""
        return self.epochs + self.finetune_epochs

    @property
    def prunes(self) -> bool:
        """Whether channels of the start are removed for good."""
        return self.prune is not None or self.prune_widths is not None

    @property
    def teachers(self) -> tuple[str, ...]:
        """The checkpoints to learn from, if any."""
        if self.teacher is None:
            return ()
        return (self.teacher,) if isinstance(self.teacher, str) else self.teacher


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
        check_config(self)

    @property
    def dense(self) -> "RunConfig":
        """The same run without gates: the dense twin."""
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, gates="none", exits=False, experts=None),
            train=dataclasses.replace(self.train, codes=None),
        )


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
        beside = str(preset).endswith(".toml") and str(base).endswith(".toml")
        parent = _read_preset(Path(preset).parent / base if beside else base)
        if "extends" in parent:
            raise UserError(f"preset {preset} extends {base}, which itself extends another preset")
        values = _merge(parent, values)
    # What is written by hand is of the present version, unless it says otherwise.
    return config_from_dict({"schema": SCHEMA, **_override(values, overrides)})


def preset_comment(preset: str | Path) -> str:
    """What a preset's file says of itself in its first lines: what it is for, what comes before."""
    lines = _content(_preset_file(preset)).splitlines(keepends=True)
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))


def apply_overrides(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """A configuration with `key.path=value` overrides applied."""
    return config_from_dict(_override(config_to_dict(config), overrides))


def config_from_dict(values: Mapping[str, Any], *, used: bool = False) -> RunConfig:
    """Builds a RunConfig from nested plain values; rejects unknown keys and wrong types.

    Args:
        values: of this version or an earlier one.
        used: of a network that is only used, not trained; see `upgraded`.
    """
    return from_plain(upgraded(values, used=used), RunConfig)


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain values; options left at `None` are left out."""
    return {"schema": SCHEMA, **to_plain(config)}


def config_to_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML, fit to be saved and loaded as a preset."""
    return tomli_w.dumps(config_to_dict(config))


def _read_preset(preset: str | Path) -> dict[str, Any]:
    return read_toml(_preset_file(preset), f"preset {preset}")


def _preset_file(preset: str | Path) -> Any:
    if str(preset).endswith(".toml"):
        return Path(preset)
    names = preset_names()
    if str(preset) not in names:
        raise UserError(
            f"no preset is named {str(preset)!r}{suggest(str(preset), names)}; "
            f"there are {', '.join(names)}, or give the path of a .toml file"
        )
    return resources.files("deepmoe").joinpath("presets", f"{preset}.toml")


def _content(path: Any) -> str:
    """The text of a user's file, or of one of the package's own."""
    whole = read_regular(path) if isinstance(path, Path) else path.read_bytes()
    return whole.decode("utf-8").replace("\r\n", "\n")


def read_toml(path: Any, what: str) -> dict[str, Any]:
    """The values of a TOML file, a `Path` or a resource; `what` names it to a user."""
    try:
        return tomllib.loads(_content(path))
    except ValueError as error:  # wrong TOML, text or numbers
        raise UserError(f"{what} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise UserError(f"{what} is not valid TOML: its brackets are nested too deeply") from error
    except OSError as error:
        raise UserError(f"cannot read {what}: {error.strerror}") from error


def _parse_override(item: str) -> dict[str, Any]:
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set takes key=value, such as train.lr=0.05, not {item!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
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
