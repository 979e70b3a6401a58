"""DeepMoE: embedding, gate heads and base network, joined."""

import copy
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from deepmoe.config import (
    GIVEN,
    ON_THE_WAY,
    EmbeddingConfig,
    HeadsConfig,
    HeadsKind,
    ModelConfig,
)
from deepmoe.errors import UserError
from deepmoe.feature_gates import fit_to_network, make_feature_heads
from deepmoe.graph import Gating, Graph, choose, describe, with_kept
from deepmoe.layers import (
    Decisions,
    FeatureHeads,
    GateHeads,
    Gates,
    NoisyTopKHeads,
    RouteCodebook,
    ScaleFactors,
    ShallowEmbedding,
)
from deepmoe.layers.embedding import CIFAR_WIDTHS, IMAGENET_WIDTHS
from deepmoe.network_embedding import FeatureNetwork, NetworkEmbedding
from deepmoe.ops import at_least_single

if TYPE_CHECKING:
    from deepmoe.data import DataInfo


Embedding = ShallowEmbedding | NetworkEmbedding | FeatureNetwork
Heads = GateHeads | NoisyTopKHeads | ScaleFactors | FeatureHeads


class Whole(NamedTuple):
    """A base network before channels are removed for good, and its graph."""

    network: nn.Module
    graph: Graph


class DeepMoEOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
        logits: the model's answer.
        embedding_logits: the embedding's own; `None` for a model without one.
        gates: of every layer; `None` for a model without any.
        exited: which images the embedding has answered; `None` where it answers none, as in
            training.
        decisions: of an agent that makes the gates; `None` where there is none.
    """

    logits: Tensor
    embedding_logits: Tensor | None
    gates: Gates | None
    exited: Tensor | None = None
    decisions: Decisions | None = None


SMALL_IMAGES = 64  # pixels a side, below which the embedding is that for CIFAR
MOST_SHARE = 0.03  # of a network's MACs, that its embedding takes by default
MOST_HEADS_SHARE = 0.005  # of the MACs: heads take long for what they cost, all in reading
LEAST_WIDTH = 4
MOST_CLASSES = 1_000_000

# Lets torch.export.save write down the type of the output.
_pytree._register_namedtuple(DeepMoEOutput, serialized_type_name="deepmoe.DeepMoEOutput")
_pytree._register_namedtuple(Decisions, serialized_type_name="deepmoe.Decisions")


class DeepMoE(nn.Module):
    """A base network whose channels an embedding of the image switches and scales.

    Gates are passed as arguments and returned, never kept on a layer. Without embedding and heads
    it is the dense twin: the same base network, losses and training loop. With a codebook, the
    gates of an image are those of the nearest of its codes. With exits, the embedding answers the
    images that it is sure of: its logits are the model's there, and the base network need not run.
    Heads that look at features need no embedding: they make gates while the base network runs.

    Args:
        embedding: looks at the image.
        heads: make gates from its answer. Without, it is there for exits alone.
        network: the base network, any module that gives logits of images.
        gating: its graph, and where gates stand in it.
        codebook: of routes, if images are to share a few of them.
        thresholds: one for each channel of all layers; gates below are closed. Checkpoints that
            earlier versions have cut hold some.
        source: what the base network is made of, for checkpoints.
        exit_at: how sure the embedding must be to answer, from 0 to 1: the probability that it
            gives its first guess. `None`: it never answers.
        unpruned: the graph of the network that this one was before channels were removed for good;
            shares of the dense MACs are those of its. `None`: none were.
    """

    thresholds: Tensor | None
    exit_at: Tensor | None
    same_for_all = True  # whether the same operations run for any images: else none are captured

    def __init__(
        self,
        embedding: Embedding | None,
        heads: Heads | None,
        network: nn.Module,
        gating: Gating,
        codebook: RouteCodebook | None = None,
        thresholds: Tensor | None = None,
        source: ModelConfig | None = None,
        exit_at: Tensor | None = None,
        unpruned: Graph | None = None,
    ) -> None:
        super().__init__()
        if isinstance(heads, FeatureHeads):
            if any(part is not None for part in (embedding, codebook, thresholds, exit_at)):
                raise ValueError("heads that look at features take nothing else beside them")
            _ = gating.feature_code, gating.makes  # not to be found out by a compiler on its way
        looks = heads is not None and not isinstance(heads, ScaleFactors | FeatureHeads)
        if embedding is None and (looks or exit_at is not None):
            raise ValueError("heads and exits need an embedding")
        if codebook is not None and heads is None:
            raise ValueError("a codebook needs gates to replace: give embedding and heads too")
        self.embedding = embedding
        self.heads = heads
        self.network = network
        self.gating = gating
        self.source = source or ModelConfig(GIVEN, gates=gating.names)
        self.unpruned = unpruned
        self.codebook = codebook
        self.register_buffer("thresholds", thresholds)
        self.register_buffer("exit_at", exit_at)

    @property
    def one_network(self) -> nn.Module:
        """A network that the graph describes: the base network."""
        return self.network

    @property
    def gated(self) -> bool:
        """False for a network that runs the same channels for all images."""
        return self.heads is not None

    @property
    def on_the_way(self) -> bool:
        """Whether gates are made of features, and not known before the base network runs."""
        return isinstance(self.heads, FeatureHeads)

    def check_ahead(self) -> None:
        """Refuses gates that are not known before the base network runs, or are of no image."""
        if isinstance(self.heads, ScaleFactors):
            raise UserError(
                "the model has scaling factors, which only tell what to prune: use it as "
                "train.start, with train.prune and train.prune_by=sss"
            )
        if self.on_the_way:
            raise UserError(
                "the model's gates (fbs, rnp) are made of features on the way, and not known "
                "before the network runs: that needs a model with an embedding"
            )

    def as_input(self, x_BCHW: Tensor) -> Tensor:
        """Images where the model is, in its precision."""
        return x_BCHW.to(next(self.parameters()))

    def route(self, x_BCHW: Tensor) -> tuple[Gates | None, Tensor | None]:
        """The gates of every layer and the embedding's class logits, before the base network.

        Raises:
            UserError: where gates are made on the way, so that they are not known before.
        """
        if isinstance(self.heads, ScaleFactors):
            return self.heads.of_images(x_BCHW), None
        self.check_ahead()
        if self.embedding is None:
            return None, None
        e_BD, embedding_logits = self.embedding(x_BCHW)
        if self.heads is None:
            return None, embedding_logits
        gates = self.concatenated_gates(e_BD).split(self.gating.widths, dim=1)
        if self.codebook is not None:
            gates = self.codebook(gates)
        return gates, embedding_logits

    def concatenated_gates(self, e_BD: Tensor) -> Tensor:
        """What the heads make of mixture weights, for all layers as one tensor."""
        assert isinstance(self.heads, GateHeads | NoisyTopKHeads)
        g_BC = self.heads.concatenated(e_BD)
        return g_BC if self.thresholds is None else close_small(g_BC, self.thresholds)

    def forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        if isinstance(self.heads, FeatureHeads):
            on_the_way = self.heads.start()
            logits, made = self.gating.run_with(self.network, x_BCHW, on_the_way.gates)
            return DeepMoEOutput(logits, None, made, decisions=on_the_way.decisions)
        gates, embedding_logits = self.route(x_BCHW)
        logits = self.gating(self.network, x_BCHW, gates)
        if self.exit_at is None or self.training:
            return DeepMoEOutput(logits, embedding_logits, gates)
        assert embedding_logits is not None
        exited = self.exits(embedding_logits)
        logits = torch.where(exited[:, None], embedding_logits.to(logits.dtype), logits)
        return DeepMoEOutput(logits, embedding_logits, gates, exited)

    def exits(self, embedding_logits: Tensor) -> Tensor:
        """Which images the embedding answers, by its logits."""
        assert self.exit_at is not None
        return confidence(embedding_logits) >= self.exit_at

    def with_gates(
        self,
        heads: Heads | None = None,
        codebook: RouteCodebook | None = None,
        thresholds: Tensor | None = None,
    ) -> "DeepMoE":
        """The same network and embedding under other gates. Parts are shared, not copied."""
        heads = self.heads if heads is None else heads
        parts = (self.embedding, heads, self.network, self.gating)
        model = DeepMoE(*parts, codebook, thresholds, self.source, self.exit_at, self.unpruned)
        for part in (heads, codebook):
            if part is not None:
                part.train(self.training)
        model.training = self.training  # other parts keep their own modes
        return model

    @property
    def classes(self) -> int:
        """Number of classes that the logits tell apart."""
        return self.gating.graph.classes

    def check_finite(self) -> None:
        """Refuses weights, and statistics of batch norms, that are not finite."""
        tensors = {n: t for n, t in self.state_dict().items() if t.is_floating_point()}
        finite = torch.stack([t.isfinite().all() for t in tensors.values()]).tolist()
        wrong = [name for name, good in zip(tensors, finite, strict=True) if not good]
        if wrong:
            raise UserError(f"the model can't be used: {wrong[0]} has values that are not finite")

    def save_pretrained(
        self, folder: str | Path, *, info: "DataInfo | None" = None, **hub: Any
    ) -> None:
        """Writes the model into a folder: weights as safetensors, a description as JSON.

        Args:
            folder: is made if it is not there.
            info: names of the classes, and how images are normalised; `load_checkpoint` gives one.
            **hub: of huggingface_hub's `ModelHubMixin.save_pretrained`.
        """
        _hub().save_pretrained(self, folder, info, **hub)

    def push_to_hub(self, repo_id: str, *, info: "DataInfo | None" = None, **hub: Any) -> str:
        """Uploads the model to the Hugging Face Hub; arguments as of `save_pretrained`."""
        return _hub().push_to_hub(self, repo_id, info, **hub)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        network: str | nn.Module | None = None,
        device: str = "cpu",
        **hub: Any,
    ) -> "DeepMoE":
        """Reads a model that `save_pretrained` or `push_to_hub` has written.

        Args:
            name: of a folder, or of a repository on the hub.
            network: where the base network is not the zoo's own, what makes it, or one like it.
            device: to put the model on.
            **hub: of huggingface_hub's `ModelHubMixin.from_pretrained`, such as `revision`.
        """
        return _hub().from_pretrained(name, network=network, device=device, **hub)

    def routing_modules(self) -> list[nn.Module]:
        """What the fine-tune stage freezes: the embedding network and the heads."""
        return [m for m in (self.embedding, self.heads) if m is not None]


def can_be_captured(module: nn.Module) -> bool:
    """Whether a module's work can be compiled and captured: no model in it depends on images."""
    return all(m.same_for_all for m in module.modules() if isinstance(m, DeepMoE))


def _hub() -> Any:
    return import_module("deepmoe.hub")  # it knows how models are made, and stands above


def confidence(logits: Tensor) -> Tensor:
    """How sure a classifier is of its first guess: the probability it gives it, for each image."""
    return at_least_single(logits).softmax(dim=1).amax(dim=1)


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
        made = NoisyTopKHeads(looks.dim, gating.widths, share=heads.share, **init)
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


def check_gated(model: Any, taker: str) -> None:
    """Refuses what is no gated model with weights of its own."""
    if not isinstance(model, DeepMoE) or not model.gated:
        raise UserError(f"{taker} takes a gated model: give it deepmoe.gate(network, images)")
    if next(model.network.parameters(), None) is None:
        raise UserError(f"{taker} takes no sparse model: give it the model that it was made of")


def close_small(gates: Tensor, thresholds: Tensor) -> Tensor:
    """Gates below their thresholds become zero, others stay as they are."""
    return torch.where(gates >= thresholds, gates, 0.0)
