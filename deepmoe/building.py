"""Gates for a network: an embedding and heads that fit it, joined to a model."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from deepmoe.config import EmbeddingConfig, HeadsConfig, HeadsKind, ModelConfig
from deepmoe.config_checks import ON_THE_WAY
from deepmoe.errors import UserError
from deepmoe.feature_gates import fit_to_network, make_feature_heads
from deepmoe.graph import Gating, Graph, choose, describe, with_kept
from deepmoe.layers import GateHeads, NoisyTopKHeads, ScaleFactors, ShallowEmbedding
from deepmoe.layers.embedding import CIFAR_WIDTHS, IMAGENET_WIDTHS
from deepmoe.model import DeepMoE, Embedding, Heads
from deepmoe.network_embedding import NetworkEmbedding

SMALL_IMAGES = 64  # pixels a side, below which the embedding is that for CIFAR
MOST_SHARE = 0.03  # of a network's MACs, that its embedding takes by default
MOST_HEADS_SHARE = 0.005  # of the MACs: heads take long for what they cost, all in reading
LEAST_WIDTH = 4
MOST_CLASSES = 1_000_000


class Whole(NamedTuple):
    """A base network before channels are removed for good, and its graph."""

    network: nn.Module
    graph: Graph


def gate(
    module: nn.Module,
    images: Tensor,
    *,
    where: str | Sequence[str | int] = "inner",
    classes: int | None = None,
    embedding: EmbeddingConfig | None = None,
    heads: HeadsConfig | None = None,
) -> DeepMoE:
    """Puts gates into a network: what it computes then depends on the image.

    All gates start at one, so that the model computes what the network did. Weights are shared
    with it: to train one is to train the other.

    Args:
        module: any convolutional network that gives logits of images.
        images: a batch of such as it takes, normalised.
        where: `inner` gates what stays inside of residual blocks, `all` also residual streams; a
            list names groups of channels, as `deepmoe describe` shows them.
        classes: number of classes. If it is not the network's, its last layer is replaced.
        embedding: form and widths of the embedding network; one that is cheap for the network if
            not given.
        heads: kind and initialisation of the gate heads.

    Raises:
        UserError: where the network can't be captured, or nothing in it can be gated.
    """
    graph = describe(module, images)
    if classes is not None and classes != graph.classes:
        graph = replace_classifier(module, graph, images, classes)
    gating = choose(graph, where)
    pinned = {g.name: g.pinned for g in gating.graph.groups if g.pinned is not None}
    for reason in dict.fromkeys(why for why in pinned.values() if why.startswith("reaches")):
        first, *others = [name for name, why in pinned.items() if why == reason]
        more = f", and that of {len(others)} others" if others else ""
        warnings.warn(f"what {first} makes stays ungated{more}: it {reason}", stacklevel=2)
    size = (images.shape[-2], images.shape[-1])
    embedding = embedding or usual_embedding(gating, size)
    return add_gates(module, gating, embedding, heads, usual_widths(gating.graph, size))


def add_gates(
    network: nn.Module,
    gating: Gating,
    embedding: EmbeddingConfig | None,
    heads: HeadsConfig | None,
    widths: tuple[int, ...],
    source: ModelConfig | None = None,
    whole: Whole | None = None,
) -> DeepMoE:
    """A network under gates that an embedding makes.

    Args:
        network: the base network.
        gating: of the network.
        embedding: how the embedding is made.
        heads: how the heads are.
        widths: of the embedding, if it has the usual ones.
        source: what the base network is made of.
        whole: what the base network was before it was pruned, if it was.
    """
    heads = heads or HeadsConfig()
    if not isinstance(heads, HeadsConfig):
        raise UserError("embedding is an EmbeddingConfig, and heads a HeadsConfig")
    if heads.kind not in get_args(HeadsKind):
        raise UserError(
            f"heads are of the kind {', '.join(get_args(HeadsKind))}, not {heads.kind!r}"
        )
    if heads.kind == "scale":
        factors = ScaleFactors(gating.widths)
        _move_beside(network, factors)
        return _as_model(None, factors, network, gating, source)
    if heads.kind in ON_THE_WAY:
        on_the_way = make_feature_heads(gating, heads)
        _move_beside(network, on_the_way)
        fit_to_network(on_the_way, network, gating)
        return _as_model(None, on_the_way, network, gating, source)
    looks = _embedding_for(network, whole or Whole(network, gating.graph), embedding, widths)
    init = {} if heads.init is None else {"init": heads.init}
    made: Heads
    if heads.kind == "relu":
        made = GateHeads(looks.dim, gating.widths, **init)
    else:
        made = NoisyTopKHeads(
            looks.dim, gating.widths, share=heads.share, total=heads.total, **init
        )
    _move_beside(network, made)
    return _as_model(looks, made, network, gating, source)


def add_exits(
    network: nn.Module,
    gating: Gating,
    embedding: EmbeddingConfig | None,
    widths: tuple[int, ...],
    source: ModelConfig | None = None,
    whole: Whole | None = None,
) -> DeepMoE:
    """A network without gates, and an embedding that may answer in its place.

    Arguments are those of `add_gates`.
    """
    looks = _embedding_for(network, whole or Whole(network, gating.graph), embedding, widths)
    return _as_model(looks, None, network, gating, source)


def _as_model(
    embedding: Embedding | None,
    heads: Heads | None,
    network: nn.Module,
    gating: Gating,
    source: ModelConfig | None,
) -> DeepMoE:
    model = DeepMoE(embedding, heads, network, gating, source=source)
    model.training = network.training  # each module of the network keeps its own mode
    return model


def _embedding_for(
    network: nn.Module, whole: Whole, config: EmbeddingConfig | None, widths: tuple[int, ...]
) -> Embedding:
    config = config or EmbeddingConfig()
    if not isinstance(config, EmbeddingConfig):
        raise UserError("embedding is an EmbeddingConfig, and heads a HeadsConfig")
    looks: Embedding
    if config.form == "network":
        first, graph = with_kept(copy.deepcopy(whole.network), whole.graph, config.kept)
        gradient = config.task_gradient
        looks = NetworkEmbedding(first, graph, kept=config.kept, task_gradient=gradient)
    else:
        looks = ShallowEmbedding(
            whole.graph.classes,
            form=config.form,
            dim=config.dim,
            widths=widths if config.widths is None else config.widths,
            task_gradient=config.task_gradient,
            colours=whole.graph.colours,
            shrink=config.shrink,
        )
    _move_beside(network, looks)
    return looks


def _move_beside(network: nn.Module, part: nn.Module) -> None:
    """Brings a part where the network is, and into its mode."""
    like = next(network.parameters())
    # What is made without weights, to be filled from a file, has none to move.
    part.to(like.dtype if next(part.parameters()).is_meta else like)
    part.train(network.training)


def usual_embedding(gating: Gating, size: tuple[int, int]) -> EmbeddingConfig:
    """The form of an embedding that is cheap for a network.

    Its classes are the mixture weights, unless heads for all of them would cost too much.
    """
    heads = sum(gating.widths) * gating.graph.classes
    costly = heads > MOST_HEADS_SHARE * sum(gating.graph.macs(size).values())
    return EmbeddingConfig(form="latent" if costly else "classes")


def usual_widths(graph: Graph, size: tuple[int, int]) -> tuple[int, ...]:
    """Widths of an embedding for images of this size, narrow enough to be cheap for a network."""
    widths: tuple[int, ...] = CIFAR_WIDTHS if min(size) < SMALL_IMAGES else IMAGENET_WIDTHS
    dense = sum(graph.macs(size).values())
    while min(widths) > LEAST_WIDTH and _embedding_macs(graph, widths, size) > MOST_SHARE * dense:
        widths = tuple(width // 2 for width in widths)
    return widths


def _embedding_macs(graph: Graph, widths: tuple[int, ...], size: tuple[int, int]) -> int:
    with torch.device("meta"):
        return ShallowEmbedding(graph.classes, widths=widths).macs(*size)


def replace_classifier(
    module: nn.Module, graph: Graph, images: Tensor, classes: int, *, tell: bool = True
) -> Graph:
    """Gives a network a new last layer, for another number of classes.

    Args:
        module: the network, which is changed.
        graph: of the network.
        images: such as it takes.
        classes: how many logits it is to give.
        tell: whether to warn that a trained layer is lost.

    Returns:
        The changed network's graph.
    """
    check_classes(classes)
    path = graph.layers[-1].path
    old = module.get_submodule(path)
    new: nn.Module
    like: dict[str, Any] = {
        "device": next(old.parameters()).device,
        "dtype": next(old.parameters()).dtype,
    }
    if type(old) is nn.Linear:
        new = nn.Linear(old.in_features, classes, bias=old.bias is not None, **like)
    elif type(old) is nn.Conv2d and old.kernel_size == (1, 1):
        new = nn.Conv2d(old.in_channels, classes, 1, bias=old.bias is not None, **like)
    else:
        raise UserError(f"the last layer, {path}, can't be replaced: give a network with {classes}")
    module.set_submodule(path, new.train(old.training))
    try:
        changed = describe(module, images)
    except UserError:
        changed = graph
    if changed.classes != classes:
        module.set_submodule(path, old)
        raise UserError(
            f"a new last layer, {path}, does not give {classes} classes: give a network that does"
        )
    if tell:
        warnings.warn(
            f"the layer {path!r} gave {graph.classes} classes; a new one for {classes} starts "
            "untrained",
            stacklevel=3,
        )
    return changed


def check_classes(classes: int) -> None:
    """Refuses numbers of classes that no model has."""
    if not isinstance(classes, int) or not 2 <= classes <= MOST_CLASSES:
        raise UserError(f"a model has from 2 to {MOST_CLASSES:,} classes, not {classes}")
