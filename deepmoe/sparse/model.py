"""SparseModel: a trained network that runs only what its gates and exits ask for."""

import copy
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepmoe.cuda_graphs import SideStream, on_its_way
from deepmoe.errors import UserError
from deepmoe.extras import require
from deepmoe.graph import Gating, evaluation_mode
from deepmoe.hard_moe import HardMoE
from deepmoe.layers import GateHeads, Gates
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.sparse.chain import LIBRARY, StaticNetwork
from deepmoe.sparse.code_networks import CodeNetworks
from deepmoe.sparse.dynamic import DynamicNetwork
from deepmoe.sparse.embedding import fast_embedding
from deepmoe.sparse.executors import (
    FixedExecutor,
    MaskedExecutor,
    whole_network,
    with_idle,
)
from deepmoe.sparse.expert_networks import SparseExperts
from deepmoe.sparse.few_inputs import ImageConvolution, channel_multiple
from deepmoe.sparse.inference import InferenceModel
from deepmoe.sparse.planner import Plan, Planner, in_words
from deepmoe.sparse.route_groups import images_of, in_order, parts_by_route, roughly, routes_of
from deepmoe.sparse.small_network import SmallNetwork
from deepmoe.sparse.translation import translate

DENSITY_STEPS = 16  # in how many steps the planner tells densities apart
PLANNING_IMAGES = 13  # after so many, networks have planned how to run their own layers
ROUNDING = 1e-5  # by which a mixture of weights may come out above the largest of them
MOST_ROUTES_ON_GPU = 8  # each route is a network of its own, too small to fill a GPU
# Where nothing is measured: a GPU gains nothing from a few channels less in small batches.
PREFERRED, PREFERRED_ON_GPU = ("codebook", "dynamic", LIBRARY), ("codebook", "dense")


def sparsify(
    model: DeepMoE,
    *,
    dtype: torch.dtype | None = None,
    memory_limit: int | None = None,
    plan: Plan | str | Path | None = None,
) -> InferenceModel:
    """Prepares a model for inference that runs only what its gates and exits ask for.

    The result gives the outputs of the model in evaluation mode. It stays on the model's device,
    and has its own copy of the weights. Threads may share it: they take turns.

    Images that the embedding answers never reach heads and base network: their gates are zero.

    Args:
        model: a model with gates, exits or both, or of experts. One with a route codebook runs each
            code as a small network of its own, any other one with gates collects the weights of
            each route as it goes. Without gates, images that do not exit run all channels: so do
            those of a pruned network, which is small already. Experts are whole networks: each one
            runs the images of its cluster.
        dtype: of the convolutions; the model's own if not given. Gates are always made in the
            model's own precision.
        memory_limit: bytes that the small networks of a codebook may take together; those used
            least recently are dropped and made again when needed, and groups run one after
            the other. `None` keeps all.
        plan: which way to run each case, as `SparseModel.plan` gives it, or the file of one: every
            process then gives the same bits. `None` measures what is fastest, in the first runs.

    Raises:
        UserError: for a model whose exits are still to be set, one with weights that are not
            finite, or one that is sparse already.
    """
    if isinstance(model, InferenceModel):
        raise UserError("this model is sparse already")
    if not isinstance(model, DeepMoE):
        raise UserError("sparsify takes a gated model: give it deepmoe.gate(network, images)")
    model.check_ahead()
    waiting = model.embedding is not None and not isinstance(model, HardMoE)
    if waiting and not model.gated and model.exit_at is None:
        raise UserError(
            "the model has no gates, and its exits are not set, so there is nothing to skip: run "
            "deepmoe exits first"
        )
    model.check_finite()
    if next(model.parameters()).device.type == "cpu":
        require("sparse", "numba", "llvmlite")
    plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
    if isinstance(model, HardMoE):
        return SparseExperts(model, dtype or next(model.parameters()).dtype)
    return SparseModel(model, dtype or next(model.parameters()).dtype, memory_limit, plan)


class Start(NamedTuple):
    """Where the gated layers start: what those before them gave for images of a size."""

    features_BCHW: Tensor
    size: tuple[int, int]


class SparseModel(InferenceModel):
    """See `sparsify`.

    `exit_at` may be set anew. With `None`, no image exits: a model without gates then runs its base
    network alone, and gives no logits of the embedding.
    """

    @torch.no_grad()
    def __init__(
        self, model: DeepMoE, dtype: torch.dtype, memory_limit: int | None, plan: Plan | None
    ) -> None:
        super().__init__(
            copy.deepcopy(model.embedding),
            copy.deepcopy(model.heads),
            nn.Module(),  # the program takes its place
            model.gating,
            copy.deepcopy(model.codebook),
            copy.deepcopy(model.thresholds),
            exit_at=copy.deepcopy(model.exit_at),
            unpruned=model.unpruned,
            exit_vote=copy.deepcopy(model.exit_vote),
        )
        self.dtype = dtype
        device = next(model.parameters()).device
        # Without heads, no channel is ever scaled or left out.
        gating = model.gating if model.gated else Gating(model.gating.graph, ())
        keep = _channels_to_keep(model, gating.widths, channel_multiple(device, dtype))
        with evaluation_mode(model.network):
            small, small_gating, left = gating.narrow(model.network, keep)
        # Numbers of the units that are left of each group; `None` where that is all of them.
        self.kept = [
            None if len(k) == width else k.to(device)
            for k, width in zip(left, gating.widths, strict=True)
        ]
        self.program = translate(small, small_gating, dtype)
        self.whole = FixedExecutor(whole_network(self.program))
        self.set_up(device)
        preferred = PREFERRED_ON_GPU if device.type == "cuda" else PREFERRED
        self.planner: Planner[Hashable] = Planner(preferred, None if plan is None else plan.network)
        self.static = StaticNetwork(
            "whole", self.program.whole, self.program.layers, self.whole, self.planner
        )
        self.side_stream = SideStream(device)
        self.dense_shapes: set[torch.Size] = set()  # whose last batch ran all channels, on a GPU
        self.dynamic = DynamicNetwork(
            self.program, self.whole, None if plan is None else plan.layers
        )
        self.small_networks: CodeNetworks | None = None
        if model.codebook is not None:
            codes = self._kept(model.codebook.codes.split(model.codebook.widths, dim=1))
            self.small_networks = CodeNetworks(
                lambda code: SmallNetwork(self.program, [g[code] for g in codes], self.planner),
                len(model.codebook.codes),
                device,
                memory_limit,
                self.graphs,
            )
        # A model's parameters tell where it is; the base network's are packed away.
        like = next(model.parameters())
        self.place = nn.Parameter(like.new_empty(0), requires_grad=False)
        if self.embedding is not None:
            self.fast_embedding = fast_embedding(self.embedding, dtype, self.planner)
        # Whether the first layer brings images into the memory format and precision that it likes.
        self.takes_any_image = self.program.starts_with_convolution and ImageConvolution.takes(
            next(iter(self.program.layers.values()))
        )
        self.eval()

    @property
    def plan(self) -> Plan:
        """How the batches and layers that came up are run, as far as that is decided."""
        network = {in_words(case): way for case, way in self.planner.chosen.items()}
        return Plan(network, self.dynamic.plan)

    def _forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        if self.exit_at is None:
            return self._output(*self._answer(x_BCHW))
        # Part of the name: a graph reads the very threshold that it was captured with.
        look = ("look", self.exit_at)
        e_BD, embedding_logits, exited = self._run(look, self._look, x_BCHW)
        going_on = exited.tolist().count(False)
        if going_on == len(x_BCHW):
            logits, _, g_BC = self._answer(x_BCHW, e_BD, embedding_logits)
            logits = self.joint(logits, embedding_logits)
        else:
            logits, g_BC = self._answer_some(x_BCHW, e_BD, embedding_logits, exited, going_on)
        return self._output(logits, embedding_logits, g_BC, exited)

    def _answer_some(
        self, x_BCHW: Tensor, e_BD: Tensor, embedding_logits: Tensor, exited: Tensor, going_on: int
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and gates of all images, where so many of them go on."""
        logits, g_BC = embedding_logits.to(self.dtype, copy=True), None
        if self.heads is not None:
            g_BC = next(self.heads.parameters()).new_zeros(len(x_BCHW), sum(self.gating.widths))
        if not going_on:
            return logits, g_BC
        # Those that go on come first. A captured network serves batches of one size: so that there
        # are few of them, some of the others go on too, and what comes of it is dropped.
        order = exited.argsort(stable=True)
        images = order[: going_on if self.graphs is None else roughly(going_on)]
        looked = (e_BD.index_select(0, images), embedding_logits.index_select(0, images))
        answers, _, gates = self._answer(images_of(x_BCHW, images), *looked)
        answers = self.joint(answers, looked[1])
        logits.index_copy_(0, images[:going_on], answers[:going_on])
        if g_BC is not None and gates is not None:
            g_BC.index_copy_(0, images[:going_on], gates[:going_on])
        return logits, g_BC

    def _answer(
        self, x_BCHW: Tensor, *looked: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The base network's logits, the embedding's, and all gates side by side.

        Args:
            x_BCHW: images.
            looked: what the embedding gives for them, if it has looked at them already.
        """
        if self.heads is None:
            return self._run("whole", self._run_whole, x_BCHW), None, None
        size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
        prepare = self._find_routes if self.small_networks is None else self._find_codes
        g_BC, embedding_logits, features, *found = self._run("prepare", prepare, x_BCHW, *looked)
        run = self._run_by_route if self.small_networks is None else self._run_by_code
        return run(Start(features, size), g_BC, *found), embedding_logits, g_BC

    def _output(
        self,
        logits: Tensor,
        embedding_logits: Tensor | None,
        g_BC: Tensor | None,
        exited: Tensor | None = None,
    ) -> DeepMoEOutput:
        if self.graphs is not None:  # the next run will write over what graphs gave
            logits = logits.clone()
            embedding_logits, g_BC, exited = (
                None if part is None else part.clone() for part in (embedding_logits, g_BC, exited)
            )
        gates = None if g_BC is None else self._split(g_BC)
        return DeepMoEOutput(logits, embedding_logits, gates, exited)

    def start(self, x_BCHW: Tensor) -> Start:
        """What the layers before the first gate give."""
        features = self.program.start(self.whole, self._converted(x_BCHW))
        return Start(features, (x_BCHW.shape[-2], x_BCHW.shape[-1]))

    def run_masked(self, start: Start, g_BC: Tensor) -> Tensor:
        """Logits by all channels, multiplied by the gates of all layers side by side."""
        size = start.size

        def masked(features_BCHW: Tensor, g_BC: Tensor) -> Tensor:
            gates = self._kept(self._split(g_BC))
            executor = MaskedExecutor(self.whole, self.program.sites, gates)
            return self.program.go_on(executor, features_BCHW, size)

        return self._run(("masked", size), masked, start.features_BCHW, g_BC)

    def run_dynamic(self, start: Start, gates: Gates, parts: list[Tensor] | None = None) -> Tensor:
        """Logits by active channels only, route by route (`parts` says which images share one)."""
        x_BCHW, size = self._converted(start.features_BCHW), start.size
        gates = self._kept(gates)
        parts = parts_by_route(gates) if parts is None else parts
        if len(parts) == 1:
            return self.dynamic(x_BCHW, gates, size)
        outputs = [
            self.dynamic(x_BCHW[part], tuple(g[part] for g in gates), size) for part in parts
        ]
        return in_order(torch.cat(outputs), torch.cat(parts))

    def _run_by_route(self, start: Start, g_BC: Tensor, summary: Tensor) -> Tensor:
        """Logits of images, by the fastest way; the summary holds what the choice depends on."""
        x_BCHW, gates = start.features_BCHW, self._split(g_BC)
        read = on_its_way(summary)
        # A GPU that is asked for the routes first would wait for the answer. Where the last batch
        # of this shape was best run with all channels, this one most likely is too: it is run that
        # way while its routes are looked at, and if they say otherwise, once more.
        ahead = self.run_masked(start, g_BC) if x_BCHW.shape in self.dense_shapes else None
        *numbers, active = read()
        routes = len(set(numbers))
        density = round(DENSITY_STEPS * active / g_BC.numel())
        case = (*self._shape_to_plan(x_BCHW), routes, density)
        many = x_BCHW.is_cuda and routes > MOST_ROUTES_ON_GPU
        if many or (x_BCHW.is_cuda and self.planner.chosen.get(case) == "dense"):
            self.dense_shapes.add(x_BCHW.shape)
            return self.run_masked(start, g_BC) if ahead is None else ahead
        self.dense_shapes.discard(x_BCHW.shape)
        ways: dict[str, Callable[[], Tensor]] = {
            "dense": lambda: self.run_masked(start, g_BC),
            "dynamic": lambda: self.run_dynamic(start, gates, parts_by_route(gates, numbers)),
        }
        warm_up = max(1, PLANNING_IMAGES // len(x_BCHW))
        return self.planner.run(case, ways, x_BCHW.device, warm_up)

    def _run_by_code(self, start: Start, g_BC: Tensor, images: Tensor, counts_K: Tensor) -> Tensor:
        """Logits of images that are sorted by code, by the fastest way; in their own order."""
        networks, x_BCHW = self.small_networks, start.features_BCHW
        assert networks is not None
        ways: dict[str, Callable[[], Tensor]] = {
            "dense": lambda: self.run_masked(
                Start(x_BCHW[: len(images)], start.size), g_BC.index_select(0, images)
            ),
            "codebook": lambda: networks(x_BCHW, counts_K.tolist(), start.size),
        }
        warm_up = max(1, PLANNING_IMAGES // len(images))
        logits = self.planner.run(self._shape_to_plan(x_BCHW), ways, x_BCHW.device, warm_up)
        return in_order(logits, images)

    def _shape_to_plan(self, x_BCHW: Tensor) -> tuple[int, ...]:
        """What is planned for: with exits, numbers of images that are about the same are one."""
        images, *others = x_BCHW.shape
        return (images if self.exit_at is None else roughly(images), *others)

    def _look(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The embedding's mixture weights and logits, and which images exit."""
        e_BD, embedding_logits = self.fast_embedding(x_BCHW)
        return e_BD, embedding_logits, self.exits(embedding_logits)

    def _find_routes(self, x_BCHW: Tensor, *looked: Tensor) -> tuple[Tensor, ...]:
        """All gates side by side, the embedding's logits, features, and a summary of the routes.

        The summary holds the number of each image's route, and how many channels run in all.
        """
        g_BC, embedding_logits, features = self._prepare(x_BCHW, *looked)
        numbers_B, active_B = routes_of(g_BC)
        summary = torch.cat([numbers_B, active_B.sum()[None]])
        return g_BC, embedding_logits, features, summary

    def _find_codes(self, x_BCHW: Tensor, *looked: Tensor) -> tuple[Tensor, ...]:
        """All gates, the embedding's logits, features sorted by code, and how to undo that."""
        assert self.codebook is not None and self.small_networks is not None
        g_BC, embedding_logits, features = self._prepare(x_BCHW, *looked)
        codes_B = self.codebook.nearest((g_BC,))
        g_BC = self.codebook.codes[codes_B].to(g_BC.dtype)
        return g_BC, embedding_logits, *self.small_networks.sort(features, codes_B)

    def _prepare(self, x_BCHW: Tensor, *looked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads' gates side by side, the embedding's logits, and what the first layers give."""
        with self.side_stream:
            features = self._features(x_BCHW)
        e_BD, embedding_logits = looked or self.fast_embedding(x_BCHW)
        g_BC = self.concatenated_gates(e_BD)
        self.side_stream.join(features)
        return g_BC, embedding_logits, features

    def _features(self, x_BCHW: Tensor) -> Tensor:
        return self.program.start(self.whole, self._images(x_BCHW))

    def _run_whole(self, x_BCHW: Tensor) -> Tensor:
        """Logits by all channels, without gates."""
        return self.static(self._images(x_BCHW))

    def _images(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW if self.takes_any_image else self._converted(x_BCHW)

    def _split(self, g_BC: Tensor) -> Gates:
        return g_BC.split(self.gating.widths, dim=1)

    def _converted(self, x_BCHW: Tensor) -> Tensor:
        best = torch.channels_last if x_BCHW.is_cuda else torch.preserve_format
        return x_BCHW.to(self.dtype, memory_format=best)

    def _kept(self, gates: Gates) -> Gates:
        kept = zip(gates, self.kept, strict=True)
        return tuple(g if k is None else g.index_select(1, k) for g, k in kept)


def _channels_to_keep(model: DeepMoE, widths: Sequence[int], multiple: int) -> list[Tensor]:
    """Channels that some mixture can switch on: a gate is at most the largest weight of its row.

    Others are kept where that makes the width of a layer a multiple.
    """
    if model.codebook is not None:
        alive = (model.codebook.codes > 0).any(dim=0)
    elif isinstance(model.heads, GateHeads):
        largest = model.heads.weight.max(dim=1).values
        alive = largest > 0
        if model.thresholds is not None:
            alive &= largest * (1 + ROUNDING) >= model.thresholds
    else:
        alive = torch.ones(sum(widths), dtype=torch.bool)
    keep = []
    for alive_C in alive.cpu().split(list(widths)):
        kept = torch.zeros_like(alive_C)
        kept[with_idle(alive_C, multiple)] = True
        keep.append(kept)
    return keep
