"""DeepMoE: embedding, gate heads and base network, joined."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from deepmoe.config import (
    GIVEN,
    ModelConfig,
)
from deepmoe.errors import UserError
from deepmoe.graph import Gating, Graph
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
from deepmoe.network_embedding import FeatureNetwork, NetworkEmbedding
from deepmoe.ops import at_least_single, is_half

if TYPE_CHECKING:
    from deepmoe.data import DataInfo


Embedding = ShallowEmbedding | NetworkEmbedding | FeatureNetwork
Heads = GateHeads | NoisyTopKHeads | ScaleFactors | FeatureHeads


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


# Lets torch.export.save write down the type of the output.
_pytree._register_namedtuple(DeepMoEOutput, serialized_type_name="deepmoe.DeepMoEOutput")
_pytree._register_namedtuple(Decisions, serialized_type_name="deepmoe.Decisions")


class WithExits(nn.Module):
    """A module with exits, whose threshold no `half()` or `bfloat16()` rounds.

    Confidence is compared in single precision or better: where many images are about as sure, a
    threshold in fewer digits would let others exit than those it was found for.
    """

    exit_at: Tensor | None
    exit_vote: Tensor | None

    def _set_exits(self, exit_at: Tensor | None, exit_vote: Tensor | None) -> None:
        """Registers both; tensors that are precise enough are kept as they are."""
        for name, value in (("exit_at", exit_at), ("exit_vote", exit_vote)):
            self.register_buffer(name, None if value is None else at_least_single(value))

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        """What `to`, `cuda` or `half` come down to."""
        before = {"exit_at": self.exit_at, "exit_vote": self.exit_vote}
        super()._apply(*arguments, **options)
        for name, value in before.items():
            now = getattr(self, name)
            if value is not None and is_half(now.dtype):
                setattr(self, name, at_least_single(value).to(now.device))
        return self


class DeepMoE(WithExits):
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
            gives its first guess. Above 1, and for `None`, it never answers.
        exit_vote: with `exit_at`: share of the embedding's logits in the answer of images that it
            is not sure of, from 0 to 1. It has looked at them anyway. `None`: it has no say there.
        unpruned: the graph of the network that this one was before channels were removed for good;
            shares of the dense MACs are those of its. `None`: none were.
    """

    thresholds: Tensor | None
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
        exit_vote: Tensor | None = None,
    ) -> None:
        super().__init__()
        if isinstance(heads, FeatureHeads):
            if any(part is not None for part in (embedding, codebook, thresholds, exit_at)):
                raise ValueError("heads that look at features take nothing else beside them")
            _ = gating.feature_code, gating.makes  # not to be found out by a compiler on its way
        looks = heads is not None and not isinstance(heads, ScaleFactors | FeatureHeads)
        if embedding is None and (looks or exit_at is not None or exit_vote is not None):
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
        self._set_exits(exit_at, exit_vote)

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
                "the model has scaling factors, which only say what to prune: use it as "
                "train.start, with train.prune and train.prune_by=sss"
            )
        if self.on_the_way:
            raise UserError(
                "the model's gates (fbs, rnp) are computed from features while the network runs, "
                "and this needs them before: use a model with an embedding"
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
        joint = self.joint(logits, embedding_logits)
        logits = torch.where(exited[:, None], embedding_logits.to(logits.dtype), joint)
        return DeepMoEOutput(logits, embedding_logits, gates, exited)

    def exits(self, embedding_logits: Tensor) -> Tensor:
        """Which images the embedding answers, by its logits."""
        assert self.exit_at is not None
        return confidence(embedding_logits) >= self.exit_at

    def joint(self, logits: Tensor, embedding_logits: Tensor) -> Tensor:
        """The answer of base network and embedding together, for images that go on."""
        return joint_answer(logits, embedding_logits, self.exit_vote)

    def with_gates(
        self,
        heads: Heads | None = None,
        codebook: RouteCodebook | None = None,
        thresholds: Tensor | None = None,
    ) -> "DeepMoE":
        """The same network and embedding under other gates. Parts are shared, not copied."""
        heads = self.heads if heads is None else heads
        parts = (self.embedding, heads, self.network, self.gating)
        exits = (self.exit_at, self.unpruned, self.exit_vote)
        model = DeepMoE(*parts, codebook, thresholds, self.source, *exits)
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


def joint_answer(logits: Tensor, embedding_logits: Tensor, vote: Tensor | None) -> Tensor:
    """Logits of a network and of what has looked first, whose share is `vote`."""
    if vote is None:
        return logits
    return logits + vote.to(logits.dtype) * (embedding_logits.to(logits.dtype) - logits)


def check_gated(model: Any, taker: str) -> None:
    """Refuses what is no gated model with weights of its own."""
    if not isinstance(model, DeepMoE) or not model.gated:
        raise UserError(f"{taker} takes a gated model: give it deepmoe.gate(network, images)")
    refuse_sparse(model, taker)


def refuse_sparse(model: DeepMoE, taker: str) -> None:
    """Refuses a model whose base network is packed away."""
    if next(model.network.parameters(), None) is None:
        raise UserError(f"{taker} takes no sparse model: give it the model that it was made of")


def close_small(gates: Tensor, thresholds: Tensor) -> Tensor:
    """Gates below their thresholds become zero, others stay as they are."""
    return torch.where(gates >= thresholds, gates, 0.0)
