"""Heads that look at features, made for a network, and fitted to its weights."""

from torch import nn

from deepmoe.config import HeadsConfig
from deepmoe.graph import Gating, absorb_scales, channel_strengths
from deepmoe.layers import FeatureBoosting, FeatureHeads, PruningAgent


def make_feature_heads(gating: Gating, config: HeadsConfig) -> FeatureHeads:
    """New heads for the gates of a network.

    A group that several layers make is judged by what the first of them reads.
    """
    if config.kind == "fbs":
        options = {"share": config.share, "spread": config.spread}
        return FeatureBoosting(gating.inputs, gating.widths, **options)
    return PruningAgent(
        gating.inputs,
        gating.widths,
        groups=config.groups,
        hidden=config.hidden,
        penalty=config.penalty,
    )


def fit_to_network(heads: nn.Module | None, network: nn.Module, gating: Gating) -> None:
    """Gives heads that look at features what they can know from a trained network's weights.

    Args:
        heads: others are left as they are.
        network: for `FeatureBoosting`, its norms lose their scales to the gates.
        gating: of the network.
    """
    if isinstance(heads, FeatureBoosting):
        heads.start_at(absorb_scales(network, gating))
    elif isinstance(heads, PruningAgent) and not heads.ranks_C.is_meta:
        heads.order_by_strength(channel_strengths(network, gating))
