"""Exact costs: parameters, and multiply-accumulates (MACs) dense, per image and expected."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, overload

import torch
from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.graph import Gating
from deepmoe.hard_moe import HardMoE
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model, list_models, model_entry

Size = int | tuple[int, int]
"""Pixels a side, or (height, width)."""
BISECTIONS = 30


@dataclass(frozen=True)
class Costs:
    """Static costs of a model. `params` and `macs` are those of the ungated base network alone.

    Of experts, parameters are those of all, and MACs those of one.
    """

    params: int
    conv_params: int
    macs: int
    conv_macs: int
    embedding_params: int
    embedding_macs: int
    gate_params: int
    gate_macs: int


def count_costs(model: DeepMoE, size: Size) -> Costs:
    """Counts parameters and dense MACs of each part, for an input of this size."""
    graph, size = model.gating.graph, as_pair(size)
    macs = graph.macs(size)
    convs = [layer for layer in graph.layers if layer.is_conv]
    heads = 0 if model.heads is None else model.heads.macs
    # A codebook compares patterns and values of all channels with those of each code.
    codes = 0 if model.codebook is None else 2 * model.codebook.codes.numel()
    experts, distances = 1, 0
    if isinstance(model, HardMoE):
        experts, distances = len(model.centroids), model.centroids.numel()
    return Costs(
        params=_parameters(model.network),
        conv_params=experts * sum(layer.weights_per_output * len(layer.outs) for layer in convs),
        macs=sum(macs.values()) + graph.other_macs(size),
        conv_macs=sum(macs[layer.path] for layer in convs),
        embedding_params=_parameters(model.embedding),
        embedding_macs=0 if model.embedding is None else model.embedding.macs(*size),
        gate_params=_parameters(model.heads),
        gate_macs=heads + codes + distances,
    )


def dense_macs(model: DeepMoE, size: Size) -> int:
    """MACs of the base network with all channels, those included that were removed for good."""
    graph, size = model.unpruned or model.gating.graph, as_pair(size)
    return sum(graph.macs(size).values()) + graph.other_macs(size)


@overload
def count_macs(model: DeepMoE | Gating, size: Size) -> int: ...
@overload
def count_macs(
    model: DeepMoE | Gating,
    size: Size,
    gates: Sequence[Tensor] | None,
    exited: Tensor | None = None,
) -> Tensor: ...
def count_macs(
    model: DeepMoE | Gating,
    size: Size,
    gates: Sequence[Tensor] | None = None,
    exited: Tensor | None = None,
) -> int | Tensor:
    """MACs of one image through the model.

    Args:
        model: a DeepMoE, whose embedding and gate heads are counted in, or its `gating`, which
            stands for the base network alone.
        size: pixels a side, or (height, width).
        gates: the gates of a batch, as `DeepMoEOutput.gates`. A channel runs if its gate is not 0.
            Of a group that is closed altogether, nothing is counted: nobody reads it. Code that
            needs a channel at least, as the sparse engine and removal do, runs one of it.
        exited: which images the embedding has answered, as `DeepMoEOutput.exited`: neither heads
            nor base network run for those.

    Returns:
        Without either, the dense MACs; else an int64 tensor with one number an image.
    """
    gating, looking, routing, size = model, 0, 0, as_pair(size)
    if isinstance(model, DeepMoE):
        costs = count_costs(model, size)
        gating, looking, routing = model.gating, costs.embedding_macs, costs.gate_macs
    if not isinstance(gating, Gating):
        kind = type(model).__name__
        raise UserError(
            f"MACs are counted for a gated model, not a {kind}: make one with deepmoe.gate"
        )
    network: int | Tensor
    if gates is None:
        network = sum(gating.graph.macs(size).values()) + gating.graph.other_macs(size)
    else:
        gating.check(gates)
        active = torch.stack([(g != 0).sum(dim=1) for g in gates], dim=1)
        quadratic = cost_matrix(gating, size).to(active.device)
        network = macs_of_counts(active.double(), quadratic).long()
    if exited is None:
        return looking + routing + network
    return looking + (~exited).long() * (routing + network)


def cost_matrix(gating: Gating, size: Size) -> Tensor:
    """The cost of an image as a quadratic form: MACs = a^T Q a with a = (active units, 1).

    A layer costs its active inputs times its active outputs; both are sums over gates, and over
    the constant 1 for channels that have none. What passes channels on, as a depthwise convolution
    does, costs its active outputs.

    Returns:
        Q in float64, in which MACs are exact, of shape (gates + 1, gates + 1).
    """
    return _cost_matrix(gating, as_pair(size))


@lru_cache(maxsize=256)
def _cost_matrix(gating: Gating, size: tuple[int, int]) -> Tensor:
    positions = gating.graph.positions(size)
    constant = len(gating.widths)
    q = torch.zeros(constant + 1, constant + 1, dtype=torch.float64)
    for layer in gating.graph.layers:
        ins, outs = _channels_a_unit(gating, layer.ins), _channels_a_unit(gating, layer.outs)
        factor = layer.weights_per_output * positions[layer.path]
        if layer.passes_on:
            q[constant] += factor * outs
        else:
            q += factor / len(layer.ins) * torch.outer(ins, outs)
    q[constant, constant] += gating.graph.other_macs(size)
    return q.round()


def _channels_a_unit(gating: Gating, units: Tensor) -> Tensor:
    """How many channels of a layer each unit of a gate has; at last, how many have no gate."""
    numbers = gating.gate_of_channel(units)
    counts = torch.bincount(numbers + 1, minlength=len(gating.widths) + 1).double()
    widths = torch.tensor([*gating.widths, 1], dtype=torch.float64)
    return torch.cat([counts[1:], counts[:1]]) / widths


def macs_of_counts(active_BL: Tensor, quadratic: Tensor) -> Tensor:
    """MACs of the base network for each image, from its active channels in each gated layer."""
    a = torch.cat([active_BL, torch.ones_like(active_BL[:, :1])], dim=1)
    return ((a @ quadratic) * a).sum(dim=1)


def marginal_macs(quadratic: Tensor, widths_L: Tensor) -> Tensor:
    """MACs that one channel more would cost in each gated layer, when all channels run."""
    full = torch.cat([widths_L, widths_L.new_ones(1)])
    return ((quadratic + quadratic.T) @ full)[:-1]


def active_share(gates: Sequence[Tensor]) -> Tensor:
    """Share of all gated channels that run, one number an image."""
    active = torch.stack([(g != 0).sum(dim=1) for g in gates]).sum(dim=0)
    return active / max(1, sum(g.shape[1] for g in gates))


def zoo_costs() -> list[dict[str, Any]]:
    """Every model of the zoo at its usual input, with its usual classes: counts and options."""
    listed = []
    for name in list_models():
        entry = model_entry(name)
        with torch.device("meta"):  # shapes are enough to count
            model = create_model(name)
        listed.append(
            {
                "model": name,
                "input": "x".join(map(str, entry.input_size)),
                "classes": entry.classes,
                "gates": len(model.gating.widths),
                **asdict(count_costs(model, entry.input_size)),
                "options": entry.options,
            }
        )
    return listed


def least(enough: Callable[[float], bool], low: float, high: float) -> float:
    """The least number from `low` to `high` that is enough, by bisection; `high` must be."""
    if enough(low):
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def largest(fits: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number from `low` to `high` that fits, by bisection; `low` must."""
    return -least(lambda number: fits(-number), -high, -low)


def format_macs(macs: float) -> str:
    """MACs for people: in G from a billion on, in M below."""
    return f"{macs / 1e9:,.2f} G" if macs >= 1e9 else f"{macs / 1e6:.2f} M"


def _parameters(module: nn.Module | None) -> int:
    return sum(p.numel() for p in module.parameters()) if module is not None else 0


def as_pair(size: Size) -> tuple[int, int]:
    """Height and width of an input."""
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise UserError(f"an input needs at least one pixel a side, not {height}x{width}")
    return height, width
