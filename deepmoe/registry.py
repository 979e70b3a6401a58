"""The model zoo: names, and how a model is built from one."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from deepmoe.backbones import DRN, Backbone, ResNet
from deepmoe.backbones.drn import drn_a_50_stages
from deepmoe.backbones.resnet import (
    IMAGENET_DEPTHS,
    ResNetStage,
    cifar_stages,
    imagenet_stages,
    make_spec,
)
from deepmoe.backbones.vgg import CONVS_PER_STAGE, make_vgg
from deepmoe.config import EmbeddingConfig, HeadsConfig, ModelConfig, RunConfig
from deepmoe.errors import UserError
from deepmoe.layers import GateHeads, NoisyTopKHeads, ShallowEmbedding
from deepmoe.layers.embedding import CIFAR_WIDTHS, IMAGENET_WIDTHS
from deepmoe.model import DeepMoE
from deepmoe.schema import suggest

MOST_CLASSES = 1_000_000
SPREAD = "split(1, 0.5)"  # gates that start alike can't be closed one after the other by a budget

BackboneFactory = Callable[..., Backbone]


@dataclass(frozen=True)
class ModelEntry:
    """A registered base network and the setting it is meant for."""

    make: BackboneFactory  # (classes, **options) -> Backbone
    input_size: tuple[int, int]
    classes: int
    embedding_widths: tuple[int, ...]

    @property
    def options(self) -> list[str]:
        """Names of the options that `create_model` passes on."""
        parameters = inspect.signature(self.make).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


_MODELS: dict[str, ModelEntry] = {}


def register_model(
    name: str,
    *,
    input_size: tuple[int, int] = (32, 32),
    classes: int = 100,
    embedding_widths: Sequence[int] = CIFAR_WIDTHS,
) -> Callable[[BackboneFactory], BackboneFactory]:
    """Decorator that adds `factory(classes, *, ...options) -> Backbone` to the zoo."""

    def register(factory: BackboneFactory) -> BackboneFactory:
        if name in _MODELS:
            raise ValueError(f"a model named {name!r} is registered already")
        _MODELS[name] = ModelEntry(factory, input_size, classes, tuple(embedding_widths))
        return factory

    return register


def list_models() -> list[str]:
    """Names that `create_model` takes, in the order of registration."""
    return list(_MODELS)


def model_entry(name: str) -> ModelEntry:
    """The registered setting of a model: default input size, classes, options."""
    if name not in _MODELS:
        raise UserError(
            f"no model is named {name!r}{suggest(name, _MODELS)}; there are {', '.join(_MODELS)}"
        )
    return _MODELS[name]


def create_model(
    name: str,
    *,
    classes: int | None = None,
    gates: str | None = "inner",
    embedding: EmbeddingConfig | None = None,
    heads: HeadsConfig | None = None,
    **options: Any,
) -> DeepMoE:
    """Builds a model of the zoo.

    Args:
        name: one of `list_models()`.
        classes: number of classes; the model's usual number if not given.
        gates: `inner`, `all`, or `None` for the dense twin, which has neither embedding nor heads.
        embedding: form and widths of the embedding network.
        heads: kind and initialisation of the gate heads.
        **options: passed to the base network, such as `wide=2`, `widths=[...]`,
            `block="bottleneck-b"`, `gate_last=True`.

    Raises:
        UserError: for an unknown name or option, or a value out of range.
    """
    entry = model_entry(name)
    classes = entry.classes if classes is None else classes
    if not 2 <= classes <= MOST_CLASSES:
        raise UserError(f"a model has from 2 to {MOST_CLASSES:,} classes, not {classes}")
    for option in options:
        if option not in entry.options:
            raise UserError(f"{name} has no option {option!r}; it takes {', '.join(entry.options)}")
    dense = gates in (None, "none")
    if not dense and "gates" in entry.options:
        options["gates"] = gates
    elif not dense and gates != "inner":
        raise UserError(f"{name} has no choice of gates, so they can't be {gates!r}")
    backbone = entry.make(classes, **options)
    if dense:
        return DeepMoE(None, None, backbone)
    embedding = embedding or EmbeddingConfig()
    network = ShallowEmbedding(
        classes,
        form=embedding.form,
        dim=embedding.dim,
        widths=entry.embedding_widths if embedding.widths is None else embedding.widths,
        task_gradient=embedding.task_gradient,
    )
    return DeepMoE(network, _make_heads(network.dim, backbone, heads or HeadsConfig()), backbone)


def model_from_config(config: RunConfig, classes: int) -> DeepMoE:
    """Builds the model of a run whose data has this many classes."""
    model = config.model
    if model.classes not in (None, classes):
        raise UserError(
            f"model.classes is {model.classes}, but the data ({config.data.name}) has {classes}"
        )
    heads = config.heads
    if config.train.target_macs is not None and heads.kind == "relu" and heads.init is None:
        heads = dataclasses.replace(heads, init=SPREAD)
    return create_model(
        model.name,
        classes=classes,
        gates=model.gates,
        embedding=config.embedding,
        heads=heads,
        **model_options(model),
    )


def model_options(model: ModelConfig) -> dict[str, Any]:
    """What `create_model` passes on to the base network: the options that are not at default."""
    chosen = {
        "wide": model.wide if model.wide != 1.0 else None,
        "widths": model.widths,
        "block": model.block,
        "gate_last": model.gate_last,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _make_heads(dim: int, backbone: Backbone, config: HeadsConfig) -> GateHeads | NoisyTopKHeads:
    init = {} if config.init is None else {"init": config.init}
    if config.kind == "relu":
        return GateHeads(dim, backbone.gate_widths, **init)
    return NoisyTopKHeads(dim, backbone.gate_widths, share=config.share, **init)


def _residual(
    network: type[ResNet],
    stages: Sequence[ResNetStage],
    default_block: str,
    stem: Literal["cifar", "imagenet"],
    shortcut: Literal["pad", "conv"],
    classes: int,
    *,
    wide: float = 1.0,
    widths: Sequence[int] | None = None,
    block: str | None = None,
    gates: str = "inner",
) -> ResNet:
    spec = make_spec(
        stages,
        classes,
        block=block or default_block,
        wide=wide,
        widths=widths,
        gates=gates,
        stem=stem,
        shortcut=shortcut,
    )
    return network(spec)


def _register_zoo() -> None:
    for depth in CONVS_PER_STAGE:
        register_model(f"vgg{depth}")(partial(make_vgg, depth))
    for depth in (20, 32, 44, 56, 110):
        make = partial(_residual, ResNet, cifar_stages(depth), "basic", "cifar", "pad")
        register_model(f"resnet{depth}")(make)
    make = partial(_residual, ResNet, imagenet_stages(18), "bottleneck-b", "cifar", "conv")
    register_model("resnet18_cifar")(make)
    for depth in IMAGENET_DEPTHS:
        block = "basic" if depth < 50 else "bottleneck-a"
        make = partial(_residual, ResNet, imagenet_stages(depth), block, "imagenet", "conv")
        register_model(
            f"resnet{depth}",
            input_size=(224, 224),
            classes=1000,
            embedding_widths=IMAGENET_WIDTHS,
        )(make)
    make = partial(_residual, DRN, drn_a_50_stages(), "bottleneck-a", "imagenet", "conv")
    register_model(
        "drn_a_50", input_size=(1024, 2048), classes=19, embedding_widths=IMAGENET_WIDTHS
    )(make)


_register_zoo()
