"""The model zoo: names, and how a model is built from one."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import nn

from deepmoe.building import (
    Whole,
    add_exits,
    add_gates,
    check_classes,
    replace_classifier,
    usual_embedding,
    usual_widths,
)
from deepmoe.config import EmbeddingConfig, HeadsConfig, ModelConfig
from deepmoe.errors import UserError
from deepmoe.graph import Gating, Graph, choose, describe, open_groups, with_kept
from deepmoe.hard_moe import add_experts
from deepmoe.layers.embedding import CIFAR_WIDTHS, IMAGENET_WIDTHS
from deepmoe.model import DeepMoE
from deepmoe.networks import DRN, ResNet, resnet, vgg
from deepmoe.networks.resnet import (
    IMAGENET_DEPTHS,
    ResNetStage,
    cifar_stages,
    drn_a_50_stages,
    imagenet_stages,
    make_resnet,
)
from deepmoe.networks.vgg import CONVS_PER_STAGE, make_vgg
from deepmoe.schema import Gates, suggest
from deepmoe.sources import FORMS, is_source, make_network, usual_size

MOST_PIXELS = 1024 * 2048  # of images that a network of another package is tried on

NetworkFactory = Callable[..., nn.Module]


@dataclass(frozen=True)
class ModelEntry:
    """A registered base network and the setting it is meant for."""

    make: NetworkFactory  # (classes, **options) -> nn.Module
    input_size: tuple[int, int]
    classes: int
    embedding_widths: tuple[int, ...]
    inner: Callable[..., list[str]] | None  # (network, **options) -> what `inner` gates here

    @property
    def options(self) -> list[str]:
        """Names of the options that `create_model` takes."""
        return list(dict.fromkeys(_options_of(self.make) + _options_of(self.inner)))


_MODELS: dict[str, ModelEntry] = {}


def register_model(
    name: str,
    *,
    input_size: tuple[int, int] = (32, 32),
    classes: int = 100,
    embedding_widths: Sequence[int] = CIFAR_WIDTHS,
    inner: Callable[..., list[str]] | None = None,
) -> Callable[[NetworkFactory], NetworkFactory]:
    """Decorator that adds `factory(classes, *, ...options) -> nn.Module` to the zoo.

    Args:
        name: that `create_model` takes.
        input_size: of its usual images.
        classes: its usual number.
        embedding_widths: of the embedding network.
        inner: from the network to the layers whose outputs `gates="inner"` gates, if not to all
            that stays inside of residual blocks.
    """

    def register(factory: NetworkFactory) -> NetworkFactory:
        if name in _MODELS:
            raise ValueError(f"a model named {name!r} is registered already")
        widths = tuple(embedding_widths)
        _MODELS[name] = ModelEntry(factory, input_size, classes, widths, inner)
        return factory

    return register


def list_models() -> list[str]:
    """Names that `create_model` takes, in the order of registration."""
    return list(_MODELS)


def model_entry(name: str) -> ModelEntry:
    """The registered setting of a model: default input size, classes, options."""
    if name not in _MODELS:
        raise UserError(
            f"no model is named {name!r}{suggest(name, _MODELS)}; "
            f"there are {', '.join(_MODELS)}, and {FORMS}"
        )
    return _MODELS[name]


def create_model(
    name: str,
    *,
    classes: int | None = None,
    gates: str | Sequence[str] | None = "inner",
    embedding: EmbeddingConfig | None = None,
    heads: HeadsConfig | None = None,
    pretrained: bool = False,
    size: tuple[int, int] | None = None,
    exits: bool = False,
    kept: Sequence[int] | None = None,
    experts: int | None = None,
    **options: Any,
) -> DeepMoE:
    """Builds a model.

    Args:
        name: one of `list_models()`, or `timm:NAME`, `torchvision:NAME`, `hf:FOLDER_OR_ID`,
            `package.module:factory`.
        classes: number of classes; the model's usual number if not given.
        gates: `inner`, `all`, names of layers, or `None` for the dense twin, which has neither
            embedding (unless it has exits) nor heads.
        embedding: form and widths of the embedding network.
        heads: kind and initialisation of the gate heads.
        pretrained: start from trained weights, where the name is of another package.
        size: of images, where the name is of another package and its own usual one is not meant.
        exits: whether there is an embedding to answer images, also without gates.
        kept: channels that are left of each group from which some can be removed, as `prune`
            leaves them. `None`: all.
        experts: how many copies of the network there are, of which each image runs one; see
            `HardMoE`. `None`: it is no mixture of experts.
        **options: of the base network, such as `wide=2`, `widths=[...]`, `block="bottleneck-b"`,
            and of its gates, such as `gate_last=True`.

    Raises:
        UserError: for an unknown name or option, or a value out of range.
    """
    if not isinstance(name, str):
        kind = type(name).__name__
        raise UserError(f"a model is made by its name, not by a {kind}; gate takes modules")
    if classes is not None:
        check_classes(classes)
    asked: dict[str, Any] = {"gates": as_gates(gates), "exits": exits, "experts": experts}
    asked["kept"] = as_kept(kept)
    if is_source(name):
        if options:
            raise UserError(f"{name} takes no options of the zoo, such as {next(iter(options))}")
        with torch.device("cpu"):  # what others make may need values
            network = make_network(name, classes, pretrained=pretrained)
        source = ModelConfig(name, **asked)
        return from_network(network, source, classes, size, embedding, heads, pretrained)
    entry = model_entry(name)
    if pretrained:
        raise UserError(f"{name} has no trained weights to load; give train.start a checkpoint")
    classes = entry.classes if classes is None else classes
    for option in options:
        if option not in entry.options:
            raise UserError(f"{name} has no option {option!r}; it takes {', '.join(entry.options)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    made = {k: v for k, v in values.items() if k in _options_of(entry.make)}
    chosen = {k: v for k, v in values.items() if k in _options_of(entry.inner)}
    full = entry.make(classes, **made)
    whole = _graph(name, classes, tuple(made.items()))
    network, graph = with_kept(full, whole, kept)
    where = "inner" if gates in (None, "none") else gates
    if where == "inner" and entry.inner is not None:
        where = entry.inner(network, **chosen)
    gating = choose(graph, where)
    known: dict[str, Any] = {
        k: v for k, v in values.items() if k in ModelConfig.__dataclass_fields__
    }
    source = ModelConfig(name, **asked, **known)
    usual = entry.embedding_widths
    return _joined(network, gating, Whole(full, whole), embedding, heads, usual, source)


def _joined(
    network: nn.Module,
    gating: Gating,
    whole: Whole,
    embedding: EmbeddingConfig | None,
    heads: HeadsConfig | None,
    widths: tuple[int, ...],
    source: ModelConfig,
) -> DeepMoE:
    """The network, with an embedding and heads if the source asks for them."""
    model: DeepMoE
    if source.experts is not None:
        model = add_experts(network, gating, source)
    elif source.gates != "none":
        model = add_gates(network, gating, embedding, heads, widths, source, whole)
    elif source.exits:
        model = add_exits(network, gating, embedding, widths, source, whole)
    else:
        model = DeepMoE(None, None, network, gating, source=source)
    model.unpruned = None if source.kept is None else whole.graph
    return model


def from_network(
    network: nn.Module,
    source: ModelConfig,
    classes: int | None,
    size: tuple[int, int] | None,
    embedding: EmbeddingConfig | None,
    heads: HeadsConfig | None,
    pretrained: bool = True,
) -> DeepMoE:
    """A model of a network that is not the zoo's own.

    Args:
        network: the network.
        source: where it comes from, and which gates it gets.
        classes: if not as many as it has, its last layer is replaced.
        size: of images; what the network says of itself if not given.
        embedding: as in `create_model`.
        heads: as in `create_model`.
        pretrained: whether its last layer, if replaced, is a loss to be told of.
    """
    like = next(network.parameters(), torch.empty(0))
    pixels = size or usual_size(network)
    if pixels[0] * pixels[1] > MOST_PIXELS:
        raise UserError(f"images of {pixels[0]}x{pixels[1]} px are too large to run the network on")
    convs = (m for m in network.modules() if isinstance(m, nn.Conv2d))
    colours = next((conv.in_channels for conv in convs), 3)
    images = torch.randn(1, colours, *pixels, device="cpu").to(like)
    whole = describe(network, images)
    if classes is not None and classes != whole.classes:
        whole = replace_classifier(network, whole, images, classes, tell=pretrained)
    small, graph = with_kept(network, whole, source.kept)
    if source.gates == "none":
        gating = Gating(graph, tuple(open_groups(graph, "inner")))
    else:
        gating = choose(graph, source.gates)
        embedding = embedding or usual_embedding(gating, pixels)
    usual = usual_widths(whole, pixels)
    return _joined(small, gating, Whole(network, whole), embedding, heads, usual, source)


def usual_input(model: DeepMoE) -> tuple[int, int]:
    """Height and width of the images that a model is meant for."""
    name = model.source.name
    if name in _MODELS:
        return _MODELS[name].input_size
    return model.gating.graph.given_size


def as_gates(gates: str | Sequence[str] | None) -> Gates:
    """Which channels are gated, as a configuration says it."""
    if gates is None or isinstance(gates, str):
        return "none" if gates is None else gates  # type: ignore[return-value]
    return tuple(gates)


def as_kept(kept: Sequence[int] | None) -> tuple[int, ...] | None:
    """Numbers of channels, as a configuration says it."""
    return None if kept is None else tuple(kept)


@lru_cache(maxsize=64)
def _graph(name: str, classes: int, options: tuple[tuple[str, Any], ...]) -> Graph:
    """The description of a network of the zoo, found without weights: shapes are enough."""
    entry = model_entry(name)
    with torch.device("meta"):
        network = entry.make(classes, **dict(options))
        return describe(network, torch.empty(1, 3, *entry.input_size))


def _options_of(function: Callable[..., Any] | None) -> list[str]:
    if function is None:
        return []
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


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
) -> ResNet:
    return make_resnet(
        network,
        stages,
        classes,
        block=block or default_block,
        wide=wide,
        widths=widths,
        stem=stem,
        shortcut=shortcut,
    )


def _inner_of_residual(
    default_block: str, network: nn.Module, *, block: str | None = None
) -> list[str]:
    return resnet.inner_convs(network, block or default_block)


def _register_residual(
    name: str,
    network: type[ResNet],
    stages: Sequence[ResNetStage],
    block: str,
    stem: Literal["cifar", "imagenet"],
    shortcut: Literal["pad", "conv"],
    **setting: Any,
) -> None:
    make = partial(_residual, network, stages, block, stem, shortcut)
    register_model(name, inner=partial(_inner_of_residual, block), **setting)(make)


def _register_zoo() -> None:
    for depth in CONVS_PER_STAGE:
        register_model(f"vgg{depth}", inner=vgg.inner_convs)(partial(make_vgg, depth))
    for depth in (20, 32, 44, 56, 110):
        _register_residual(f"resnet{depth}", ResNet, cifar_stages(depth), "basic", "cifar", "pad")
    _register_residual(
        "resnet18_cifar", ResNet, imagenet_stages(18), "bottleneck-b", "cifar", "conv"
    )
    large = {"classes": 1000, "input_size": (224, 224), "embedding_widths": IMAGENET_WIDTHS}
    for depth in IMAGENET_DEPTHS:
        block = "basic" if depth < 50 else "bottleneck-a"
        _register_residual(
            f"resnet{depth}", ResNet, imagenet_stages(depth), block, "imagenet", "conv", **large
        )
    streets = {**large, "classes": 19, "input_size": (1024, 2048)}
    _register_residual(
        "drn_a_50", DRN, drn_a_50_stages(), "bottleneck-a", "imagenet", "conv", **streets
    )


_register_zoo()
