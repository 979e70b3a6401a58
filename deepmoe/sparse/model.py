"""SparseModel: a trained network that runs only what its gates ask for."""

import copy
from collections.abc import Callable, Hashable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepmoe.backbones import Backbone
from deepmoe.errors import UserError
from deepmoe.layers import GateHeads, Gates
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.sparse.codes import CodeNetworks
from deepmoe.sparse.convolution import Convolution
from deepmoe.sparse.dynamic import DynamicNetwork
from deepmoe.sparse.folding import fold, fold_chain
from deepmoe.sparse.graphs import GraphCache, Work
from deepmoe.sparse.planner import Planner
from deepmoe.sparse.runners import FixedRunner, MaskedRunner, in_order, parts_by_route

DENSITY_STEPS = 16  # in how many steps the planner tells densities apart
PLANNING_IMAGES = 13  # after so many, the dynamic network has planned its own layers
MOST_ROUTES_ON_GPU = 8  # each route is a network of its own, too small to fill a GPU


def sparsify(
    model: DeepMoE, *, dtype: torch.dtype | None = None, memory_limit: int | None = None
) -> "SparseModel":
    """Prepares a model for inference that runs only the channels its gates ask for.

    The result gives the outputs of the model in evaluation mode. It stays on the model's device,
    and has its own copy of the weights.

    Args:
        model: a gated model. One with a route codebook runs each code as a small network of its
            own, any other one collects the weights of each route as it goes.
        dtype: of the convolutions; the model's own if not given. Gates are always made in the
            model's own precision.
        memory_limit: bytes that the small networks of a codebook may take together; those used
            least recently are dropped and made again when needed. `None` keeps all.

    Raises:
        UserError: for a dense model, which has no channels to skip.
    """
    if not model.gated:
        raise UserError("a dense network has no gates, so that there is nothing to skip")
    return SparseModel(model, dtype or next(model.parameters()).dtype, memory_limit)


class SparseModel(DeepMoE):
    """See `sparsify`."""

    @torch.no_grad()
    def __init__(self, model: DeepMoE, dtype: torch.dtype, memory_limit: int | None = None) -> None:
        super().__init__(
            copy.deepcopy(model.embedding),
            copy.deepcopy(model.heads),
            copy.deepcopy(model.backbone).to("meta"),  # for its layers and costs only
            copy.deepcopy(model.codebook),
        )
        self.dtype = dtype
        keep = _channels_to_keep(model)
        device = next(model.parameters()).device
        # Numbers of the channels that are left in each layer; `None` where that is all of them.
        self.kept = [None if k.all() else k.nonzero().flatten().to(device) for k in keep]
        small = model.backbone.narrow(keep)
        self.layers = fold(small, dtype)
        self.wiring = [_without_weights(small)]  # in a list: it is not to be taken for a submodule
        self.whole = FixedRunner(self.layers)
        self.planner: Planner[Hashable] = Planner()
        self.graphs = GraphCache() if device.type == "cuda" else None
        self.dynamic = DynamicNetwork(self.wiring[0], self.layers, self.whole)
        self.small_networks: CodeNetworks | None = None
        if model.codebook is not None:
            codes = self._kept(model.codebook.codes.split(model.codebook.widths, dim=1))
            self.small_networks = CodeNetworks(
                self.wiring[0], self.layers, codes, memory_limit, self.graphs
            )
        assert self.embedding is not None
        self.embedding_convs = [Convolution(c) for c in fold_chain(self.embedding.convs, dtype)]
        if device.type == "cuda":
            self.embedding.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.eval()

    @torch.inference_mode()
    def forward(self, x_BCHW: Tensor) -> DeepMoEOutput:
        x_BCHW = _in_best_format(x_BCHW)
        g_BC, embedding_logits, codes = self._run("route", self._find_route, x_BCHW)
        gates = g_BC.split(self.backbone.gate_widths, dim=1)
        logits = self.run_backbone(x_BCHW.to(self.dtype), gates, codes)
        return DeepMoEOutput(logits, embedding_logits, gates)

    def run_backbone(self, x_BCHW: Tensor, gates: Gates, codes: Tensor | None = None) -> Tensor:
        """Logits of images with given gates (and the codes they come from), by the fastest way."""
        ways: dict[str, Callable[[], Tensor]] = {"dense": lambda: self.run_masked(x_BCHW, gates)}
        if codes is not None:
            ways["codebook"] = lambda: self.run_codes(x_BCHW, codes)
            return self.planner.run(x_BCHW.shape, ways, x_BCHW.device)
        parts = parts_by_route(gates)
        if not x_BCHW.is_cuda or len(parts) <= MOST_ROUTES_ON_GPU:
            ways["dynamic"] = lambda: self.run_dynamic(x_BCHW, gates, parts)
        g_BC = torch.cat(gates, dim=1)
        density = torch.count_nonzero(g_BC).item() / max(1, g_BC.numel())
        case = (x_BCHW.shape, len(parts), round(DENSITY_STEPS * density))
        warm_up = max(1, PLANNING_IMAGES // len(x_BCHW))
        return self.planner.run(case, ways, x_BCHW.device, warm_up)

    def run_masked(self, x_BCHW: Tensor, gates: Gates) -> Tensor:
        """All channels, multiplied by the gates."""

        def masked(x_BCHW: Tensor, g_BC: Tensor) -> Tensor:
            gates = g_BC.split(self.backbone.gate_widths, dim=1)
            runner = MaskedRunner(self.whole, self._kept(gates))
            return self.wiring[0].wire(_in_best_format(x_BCHW), runner)

        return self._run("masked", masked, x_BCHW, torch.cat(gates, dim=1))

    def run_dynamic(
        self, x_BCHW: Tensor, gates: Gates, parts: list[Tensor] | None = None
    ) -> Tensor:
        """Active channels only, route by route (`parts` says which images share one)."""
        gates, x_BCHW = self._kept(gates), _in_best_format(x_BCHW)
        parts = parts_by_route(gates) if parts is None else parts
        if len(parts) == 1:
            return self.dynamic(x_BCHW, gates)
        outputs = [self.dynamic(x_BCHW[part], tuple(g[part] for g in gates)) for part in parts]
        return in_order(outputs, parts)

    def run_codes(self, x_BCHW: Tensor, codes: Tensor) -> Tensor:
        """Small networks of the codes, each for the images that take it."""
        assert self.small_networks is not None
        return self.small_networks(_in_best_format(x_BCHW), codes)

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        """What `to`, `cuda` or `half` come down to: packed weights would stay behind."""
        raise UserError("a sparse model stays as it was made: move the model, then sparsify it")

    def _find_route(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self.embedding is not None and self.heads is not None
        if self.dtype == self.embedding.project.weight.dtype:
            y_BCHW = x_BCHW.to(self.dtype)
            for convolution in self.embedding_convs:
                y_BCHW = convolution(y_BCHW)
            e_BD, embedding_logits = self.embedding.mix(y_BCHW)
        else:
            # Rounded just as in the model itself: an image must not take another route here.
            with torch.autocast(x_BCHW.device.type, self.dtype):
                e_BD, embedding_logits = self.embedding(x_BCHW)
        gates = self.heads(e_BD)
        if self.codebook is None:
            return torch.cat(gates, dim=1), embedding_logits, None
        codes = self.codebook.nearest(gates)
        return self.codebook.codes[codes].to(gates[0].dtype), embedding_logits, codes

    def _kept(self, gates: Gates) -> Gates:
        kept = zip(gates, self.kept, strict=True)
        return tuple(g if k is None else g.index_select(1, k) for g, k in kept)

    def _run(self, name: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
        if self.graphs is None:
            return function(*inputs)
        result = self.graphs.run(Work(name, function, inputs))
        return tree_map_only(Tensor, Tensor.clone, result)  # the graph will write over its own


def _channels_to_keep(model: DeepMoE) -> list[Tensor]:
    """Channels that some mixture can switch on: a gate is at most the largest weight of its row."""
    widths = model.backbone.gate_widths
    if model.codebook is not None:
        alive = (model.codebook.codes > 0).any(dim=0)
    elif isinstance(model.heads, GateHeads):
        alive = model.heads.weight.max(dim=1).values > 0
    else:
        alive = torch.ones(sum(widths), dtype=torch.bool)
    return list(alive.cpu().split(list(widths)))


def _without_weights(backbone: Backbone) -> Backbone:
    """The connections of a backbone alone."""
    for parameter in backbone.parameters():
        parameter.data = parameter.data.new_empty(0)
    return backbone


def _in_best_format(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.contiguous(memory_format=torch.channels_last) if x_BCHW.is_cuda else x_BCHW
