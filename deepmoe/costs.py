"""Exact costs: parameters, and multiply-accumulates (MACs) dense, per image and expected."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from deepmoe.backbones import Backbone
from deepmoe.errors import UserError
from deepmoe.layers import Layer
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model, list_models, model_entry

Size = int | tuple[int, int]
"""Pixels a side, or (height, width)."""
BISECTIONS = 30


@dataclass(frozen=True)
class Costs:
    """Static costs of a model. `params` and `macs` are those of the ungated base network alone."""

    params: int
    conv_params: int
    macs: int
    conv_macs: int
    embedding_params: int
    embedding_macs: int
    gate_params: int
    gate_macs: int


def count_costs(model: DeepMoE | Backbone, size: Size) -> Costs:
    """Counts parameters and dense MACs of each part, for an input of this size."""
    backbone = model.backbone if isinstance(model, DeepMoE) else model
    layers = backbone.layers(*_pair(size))
    convs = [layer for layer in layers if layer.is_conv]
    heads = model.heads if isinstance(model, DeepMoE) else None
    embedding = model.embedding if isinstance(model, DeepMoE) else None
    return Costs(
        params=_parameters(backbone),
        conv_params=sum(c.kernel_area * c.in_channels * c.out_channels for c in convs),
        macs=sum(map(_dense_macs, layers)),
        conv_macs=sum(map(_dense_macs, convs)),
        embedding_params=_parameters(embedding),
        embedding_macs=sum(map(_dense_macs, embedding.layers(*_pair(size)))) if embedding else 0,
        gate_params=_parameters(heads),
        gate_macs=_gate_macs(model),
    )


def _gate_macs(model: DeepMoE | Backbone) -> int:
    if not isinstance(model, DeepMoE):
        return 0
    heads = model.heads.weight.numel() if model.heads is not None else 0
    # A codebook compares patterns and values of all channels with those of each code.
    return heads + (2 * model.codebook.codes.numel() if model.codebook is not None else 0)


@overload
def count_macs(model: DeepMoE | Backbone, size: Size) -> int: ...
@overload
def count_macs(model: DeepMoE | Backbone, size: Size, gates: Sequence[Tensor]) -> Tensor: ...
def count_macs(
    model: DeepMoE | Backbone, size: Size, gates: Sequence[Tensor] | None = None
) -> int | Tensor:
    """MACs of one image through the model.

    Args:
        model: a DeepMoE, whose embedding and gate heads are counted in, or a base network alone.
        size: pixels a side, or (height, width).
        gates: the gates of a batch, as `DeepMoEOutput.gates`. A channel runs if its gate is not 0.

    Returns:
        Without gates, the dense MACs; with gates, an int64 tensor with one number an image.
    """
    backbone = model.backbone if isinstance(model, DeepMoE) else model
    costs = count_costs(model, size)
    routing = costs.embedding_macs + costs.gate_macs
    if gates is None:
        return costs.macs + routing
    backbone.check_gates(gates)
    active = torch.stack([(g != 0).sum(dim=1) for g in gates], dim=1)
    quadratic = cost_matrix(backbone, size).to(active.device)
    return macs_of_counts(active.double(), quadratic).long() + routing


def cost_matrix(backbone: Backbone, size: Size) -> Tensor:
    """The cost of an image as a quadratic form: MACs = a^T Q a with a = (active channels, 1).

    A layer between two gates costs the product of their active channels; the constant 1 stands
    for the sides of layers that have no gate.

    Returns:
        Q in float64, in which MACs are exact, of shape (gates + 1, gates + 1).
    """
    constant = len(backbone.gate_widths)
    q = torch.zeros(constant + 1, constant + 1, dtype=torch.float64)
    for layer in backbone.layers(*_pair(size)):
        factor = layer.kernel_area * layer.positions
        factor *= layer.in_channels if layer.in_gate is None else 1
        factor *= layer.out_channels if layer.out_gate is None else 1
        row = constant if layer.in_gate is None else layer.in_gate
        column = constant if layer.out_gate is None else layer.out_gate
        q[row, column] += factor
    return q


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
                "gates": len(model.backbone.gate_widths),
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


def format_macs(macs: float) -> str:
    """MACs for people: in G from a billion on, in M below."""
    return f"{macs / 1e9:,.2f} G" if macs >= 1e9 else f"{macs / 1e6:.2f} M"


def _dense_macs(layer: Layer) -> int:
    return layer.kernel_area * layer.positions * layer.in_channels * layer.out_channels


def _parameters(module: nn.Module | None) -> int:
    return sum(p.numel() for p in module.parameters()) if module is not None else 0


def _pair(size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise UserError(f"an input has at least one pixel a side, not {height}x{width}")
    return height, width
