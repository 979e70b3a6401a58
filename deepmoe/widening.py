"""Wide networks from trained ones: channels are copied, and what the network computes stays."""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from deepmoe.config import GIVEN, ModelConfig
from deepmoe.configured_models import model_options
from deepmoe.errors import UserError
from deepmoe.graph import Gating, choose
from deepmoe.graph.describing import build
from deepmoe.graph.narrow import resized
from deepmoe.hard_moe import refuse_experts
from deepmoe.layers import GateHeads
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model, list_models

MOST = 16.0  # times as many channels


@torch.no_grad()
def widen(model: DeepMoE, factor: float, *, noise: float = 0.05, seed: int = 0) -> DeepMoE:
    """A model with more channels wherever it has gates, that computes the same.

    Channels are copied, and those that read them share the weight among the copies: not evenly,
    so that copies learn different things.

    Args:
        model: gated, without a codebook or thresholds: `gate(network, images)` makes one.
        factor: how many times as many channels, from 1. Fractions copy some channels more often.
        noise: by what share of a weight its parts differ, from 0 to 1.
        seed: of the noise.

    Returns:
        A model with its own copy of all weights.

    Raises:
        UserError: for a factor out of range, or a model that can't be widened.
    """
    if isinstance(model, DeepMoE) and next(model.network.parameters(), None) is None:
        raise UserError("a sparse model can't be widened: widen the model, then sparsify it")
    if not isinstance(model, DeepMoE):
        raise UserError("widen takes a gated model: give it gate(network, images)")
    refuse_experts(model, "widen the network that they start from")
    if not isinstance(factor, int | float) or not isinstance(noise, int | float):
        raise UserError("factor and noise are numbers")
    if not 1 <= factor <= MOST or not 0 <= noise <= 1:
        raise UserError(f"the factor lies from 1 to {MOST:g}, and noise from 0 to 1")
    if model.codebook is not None or model.thresholds is not None:
        raise UserError("a model with a codebook or thresholds can't be widened")
    if not isinstance(model.heads, GateHeads | None):
        raise UserError("only relu heads can be widened")
    if model.unpruned is not None:
        raise UserError("a pruned network can't be widened: widen it first, then prune it")
    gating = model.gating
    copies = _copies(gating, factor)
    network = _widened(gating, model.network, copies, noise, seed)
    try:
        graph = build(
            gating.graph.program,
            network,
            gating.graph.colours,
            gating.graph.given_size,
            fixed=gating.graph.size is not None,
        )
        new = choose(graph, gating.names)
    except Exception as error:  # of anybody's code
        raise UserError(
            "the network can't be widened: its code relies on numbers of channels"
        ) from error
    heads = None
    if model.heads is not None:
        each = [copies[s : s + w] for s, w in zip(_starts(gating), gating.widths, strict=True)]
        heads = GateHeads(model.heads.weight.shape[1], new.widths).to(model.heads.weight)
        if not heads.weight.is_meta:
            repeated = torch.cat(each).to(model.heads.weight.device)
            heads.weight.copy_(model.heads.weight.repeat_interleave(repeated, dim=0))
    return DeepMoE(
        copy.deepcopy(model.embedding),
        heads,
        network,
        new,
        source=_source(model, factor, new),
        exit_at=copy.deepcopy(model.exit_at),
        exit_vote=copy.deepcopy(model.exit_vote),
    ).train(model.training)


def _source(model: DeepMoE, factor: float, widened: Gating) -> ModelConfig:
    """How such a network is made: by the zoo if that can, else by widening once more."""
    wide = replace(model.source, wide=model.source.wide * factor)
    if wide.name not in list_models():
        return wide
    given = ModelConfig(GIVEN, gates=widened.names, wide=factor, exits=model.source.exits)
    if wide.widths is not None:
        return given
    with torch.device("meta"):
        twin = create_model(
            wide.name, classes=model.classes, gates=wide.gates, **model_options(wide)
        )
    return wide if twin.gating.widths == widened.widths else given


def _starts(gating: Gating) -> list[int]:
    return [gating.graph.offsets[number] for number in gating.gated]


def _copies(gating: Gating, factor: float) -> Tensor:
    """How often each unit is to be there; the first ones of a group more often."""
    copies = torch.ones(gating.graph.offsets[-1] + 1, dtype=torch.int64)  # the last is for none
    for start, width in zip(_starts(gating), gating.widths, strict=True):
        total = round(width * factor)
        copies[start : start + width] = total // width
        copies[start : start + total % width] += 1
    return copies


def _widened(
    gating: Gating, network: nn.Module, copies: Tensor, noise: float, seed: int
) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    # Copies of a unit share what is read of it: parts of one, that differ a little.
    owners = torch.arange(len(copies)).repeat_interleave(copies)
    parts = 1 + noise * (2 * torch.rand(len(owners), generator=generator) - 1)
    sums = torch.zeros(len(copies)).index_add_(0, owners, parts)
    parts = parts / sums[owners]
    firsts = copies.cumsum(0) - copies

    made = resized(gating.graph, network, lambda units: _with_copies(units, copies)[0])
    for layer in gating.graph.layers:
        if not layer.passes_on:
            index, copy_numbers = _with_copies(layer.ins, copies)
            shares = parts[firsts[layer.ins[index]] + copy_numbers]
            weight = made.get_submodule(layer.path).weight
            assert isinstance(weight, Tensor)
            weight.mul_(shares.to(weight).view(1, -1, *[1] * (weight.dim() - 2)))
    return made


def _with_copies(units: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Channels with their copies behind them, and which copy of its unit each is.

    Channels of one unit that lie side by side, such as a block of a grouped convolution, are copied
    together.
    """
    breaks = torch.ones(len(units), dtype=torch.bool)
    breaks[1:] = (units[1:] != units[:-1]) | (units[1:] < 0)
    starts = breaks.nonzero().flatten().tolist()
    index: list[int] = []
    numbers: list[int] = []
    for start, end in zip(starts, [*starts[1:], len(units)], strict=True):
        for number in range(int(copies[units[start]])):
            index.extend(range(start, end))
            numbers.extend([number] * (end - start))
    return torch.tensor(index), torch.tensor(numbers)
