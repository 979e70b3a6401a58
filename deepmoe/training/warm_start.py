"""Warm starts: the weights of a trained network to begin with."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from deepmoe.config import RunConfig
from deepmoe.data import DataInfo, DataSource
from deepmoe.errors import UserError
from deepmoe.feature_gates import fit_to_network
from deepmoe.graph import channel_strengths, prunable
from deepmoe.hard_moe import HardMoE
from deepmoe.layers import GateHeads, ScaleFactors
from deepmoe.model import DeepMoE
from deepmoe.network_embedding import NetworkEmbedding
from deepmoe.pruning import prune
from deepmoe.training.experts import start_experts
from deepmoe.training.model_and_optimizer import make_model
from deepmoe.training.teachers import load_trained


def start_from(path: str, model: DeepMoE, info: DataInfo, config: RunConfig) -> DeepMoE:
    """Copies a checkpoint's weights: of the base network, and of the routing if both have it.

    Gates that start from an ungated network are handed out by its channels' strengths.

    Args:
        path: of the checkpoint.
        model: to fill.
        info: of the data to train on.
        config: of the run.

    Returns:
        The checkpoint's model.

    Raises:
        UserError: where the checkpoint does not fit the model, or knows held-out images.
    """
    start = load_trained("train.start", path, model, info, config).model
    pruned_by = config.train.prune_by if config.train.prunes else None
    if isinstance(start.heads, ScaleFactors) and pruned_by != "sss":
        raise UserError(
            f"{path} has scaling factors, which only say what to prune: set train.prune and "
            "train.prune_by=sss"
        )
    if start.on_the_way and not model.on_the_way:
        raise UserError(
            f"{path} needs its gates (fbs, rnp), which are computed from features: it can't start "
            "a network without them"
        )
    if isinstance(model, HardMoE):
        start_experts(model, start, path)
        return start
    if not config.train.epochs and model.gated and not start.gated:
        raise UserError(
            f"{path} has no gates, and without a joint stage (train.epochs) none are trained"
        )
    try:
        model.network.load_state_dict(start.network.state_dict())
    except RuntimeError as error:
        raise UserError(f"the base network of {path} has different layers or widths") from error
    if not start.gated and not prunes(config):  # channels that go are not worth a gate
        _hand_out(model)
    try:
        for module, trained in zip(_routing(model), _routing(start), strict=True):
            factors = isinstance(module, ScaleFactors) or isinstance(trained, ScaleFactors)
            if module is not None and trained is not None and not factors:
                module.load_state_dict(trained.state_dict())
    except RuntimeError as error:
        raise UserError(
            f"the embedding or gates of {path} have a different form or size"
        ) from error
    if start.thresholds is not None:
        model.thresholds = start.thresholds.to(next(model.parameters()))
    return start


def prunes(config: RunConfig) -> bool:
    """Whether a run removes channels of its start, for the base network or for the embedding."""
    return config.train.prunes or config.embedding.prune is not None


def pruned_start(
    model: DeepMoE, start: DeepMoE, config: RunConfig, data: DataSource
) -> tuple[DeepMoE, RunConfig]:
    """What is left of a started model by `train.prune` and `embedding.prune`.

    Args:
        model: with the start's weights.
        start: what they are of.
        config: of the run.
        data: of the run; channels are judged by its training images.

    Returns:
        The model, and the configuration that `model_from_config` makes such a one of.
    """
    train, size = config.train, data.info.size
    network = DeepMoE(None, None, model.network, model.gating, source=model.source)

    def left(share: float | None, widths: tuple[int, ...] | None = None) -> DeepMoE:
        return prune(
            network,
            size,
            share,
            data.train,
            by=train.prune_by,
            tilt=train.prune_tilt,
            widths=widths,
            factors=_factors(start),
            seed=train.seed,
        )

    weights = {"network": model.network, "embedding": model.embedding}
    if train.prunes:
        small = left(train.prune, train.prune_widths)
        weights["network"] = small.network
        config = replace(config, model=replace(config.model, kept=small.source.kept))
    if config.embedding.prune is not None:
        first = left(config.embedding.prune)
        kept = first.source.kept
        weights["embedding"] = NetworkEmbedding(first.network, first.gating.graph, kept=kept)
        config = replace(config, embedding=replace(config.embedding, kept=kept))
    pruned = make_model(config, data.info, next(model.parameters()).device)
    for name, module in weights.items():
        if module is not None:
            pruned.get_submodule(name).load_state_dict(module.state_dict())
    _hand_out(pruned)
    return pruned, config


def _factors(start: DeepMoE) -> list[Tensor] | None:
    """What the start's channels are scaled with, of every group that can lose some."""
    if not isinstance(start.heads, ScaleFactors):
        return None
    of_group = dict(
        zip(start.gating.gated, start.heads.weight.split(start.heads.widths), strict=True)
    )
    every = prunable(start.gating.graph)
    return [
        of_group.get(number, torch.ones(width))
        for number, width in zip(every.gated, every.widths, strict=True)
    ]


def _hand_out(model: DeepMoE) -> None:
    """Gives new gates what they can know from the weights of a trained network."""
    fit_to_network(model.heads, model.network, model.gating)
    if isinstance(model.heads, GateHeads):
        model.heads.order_by_strength(channel_strengths(model.network, model.gating))


def _routing(model: DeepMoE) -> tuple[nn.Module | None, ...]:
    return model.embedding, model.heads
