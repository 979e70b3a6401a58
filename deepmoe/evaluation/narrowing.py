"""A gated model without the channels that no image uses."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepmoe.errors import UserError
from deepmoe.evaluation.gate_record import GateRecord
from deepmoe.layers import GateHeads, NoisyTopKHeads, RouteCodebook, ScaleFactors
from deepmoe.model import DeepMoE, Heads, check_gated


def used_channels(record: GateRecord) -> list[np.ndarray]:
    """For each gated layer, which channels run for at least one image."""
    return [(gates != 0).any(axis=0) for gates in record.gates]


@torch.no_grad()
def narrowed_model(model: DeepMoE, used: Sequence[Tensor] | Sequence[np.ndarray]) -> DeepMoE:
    """The same model without some gated channels, and without their rows of the gate heads.

    It answers as the model does wherever these channels would not have run.

    Args:
        model: whose gates are known before the network runs.
        used: for each gated layer, which channels stay, such as `used_channels` gives.

    Returns:
        A model with its own copy of the weights; the embedding is shared.
    """
    check_gated(model, "narrowed_model")
    if model.on_the_way:
        raise UserError(
            "gates that are computed while the network runs (fbs, rnp) can't be narrowed"
        )
    network, gating, left = model.gating.narrow(model.network, list(map(torch.as_tensor, used)))
    starts = [sum(model.gating.widths[:i]) for i in range(len(left))]
    rows = torch.cat([at + start for at, start in zip(left, starts, strict=True)])
    rows = rows.to(next(model.parameters()).device)
    codebook = None
    if model.codebook is not None:
        codes, weight = model.codebook.codes[:, rows], model.codebook.weight[rows]
        codebook = RouteCodebook(codes, weight, gating.widths).to(codes.device)
    small = DeepMoE(
        model.embedding,
        _heads(model, gating.widths, rows),
        network.train(model.training),
        gating,
        codebook,
        None if model.thresholds is None else model.thresholds[rows],
        model.source,
        model.exit_at,
        model.unpruned or model.gating.graph,
        model.exit_vote,
    )
    small.training = model.training
    return small


def _heads(model: DeepMoE, widths: Sequence[int], rows: Tensor) -> Heads:
    heads = model.heads
    made: Heads
    if isinstance(heads, GateHeads):
        made = GateHeads(heads.weight.shape[1], widths)
    elif isinstance(heads, NoisyTopKHeads):
        made = NoisyTopKHeads(heads.weight.shape[1], widths, share=heads.share, total=heads.total)
        # As many as before: those that are gone were never among them.
        made.kept = [min(kept, width) for kept, width in zip(heads.kept, widths, strict=True)]
    else:
        assert isinstance(heads, ScaleFactors)
        made = ScaleFactors(widths)
    made.load_state_dict({name: t[rows] for name, t in heads.state_dict().items()})
    return made.to(rows.device, heads.weight.dtype).train(heads.training)
