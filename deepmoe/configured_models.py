"""A model from a configuration, and the configuration of a model."""

import dataclasses
from typing import Any

import torch
from torch import nn

from deepmoe.config import EmbeddingConfig, ModelConfig, RunConfig
from deepmoe.errors import UserError
from deepmoe.hard_moe import HardMoE
from deepmoe.layers import FeatureHeads
from deepmoe.model import DeepMoE
from deepmoe.network_embedding import NetworkEmbedding
from deepmoe.registry import create_model, from_network

SPREAD = "split(1, 0.5)"  # gates that start alike can't be closed one after the other by a budget


def model_from_config(
    config: RunConfig,
    classes: int,
    *,
    size: tuple[int, int] | None = None,
    network: nn.Module | None = None,
    weights: bool = True,
) -> DeepMoE:
    """Builds the model of a run.

    Args:
        config: of the run.
        classes: of its data.
        size: of its images.
        network: its base network, if that is there already.
        weights: whether to load trained weights, where the configuration asks for them.
    """
    model = config.model
    if model.classes not in (None, classes):
        raise UserError(
            f"model.classes is {model.classes}, but the data ({config.data.name}) has {classes}"
        )
    heads = config.heads
    if config.train.target_macs is not None and heads.kind == "relu" and heads.init is None:
        heads = dataclasses.replace(heads, init=SPREAD)
    if network is not None:
        return from_network(network, model, classes, size, config.embedding, heads)
    return create_model(
        model.name,
        classes=classes,
        gates=model.gates,
        embedding=config.embedding,
        heads=heads,
        pretrained=model.pretrained and weights,
        size=size,
        exits=model.exits,
        kept=model.kept,
        experts=model.experts,
        **model_options(model),
    )


def config_of(model: DeepMoE, config: RunConfig | None = None) -> RunConfig:
    """A configuration that `model_from_config` makes such a model of.

    Args:
        model: made by `gate`, `create_model` or `widen`.
        config: everything else.
    """
    config = config or RunConfig()
    check_precision(model)
    if next(model.parameters()).dtype == torch.float64:
        train = dataclasses.replace(config.train, precision="64-true")
        config = dataclasses.replace(config, train=train)
    made, heads = model.embedding, model.heads
    if isinstance(model, HardMoE):
        return dataclasses.replace(config, model=model.source)
    if heads is None:
        plain = dataclasses.replace(model.source, gates="none", exits=made is not None)
        config = dataclasses.replace(config, model=plain)
    else:
        known: dict[str, Any] = {
            "kind": heads.kind,
            "share": getattr(heads, "share", config.heads.share),
            "total": getattr(heads, "total", config.heads.total),
        }
        if isinstance(heads, FeatureHeads):
            known = heads.settings
        kind = dataclasses.replace(config.heads, **known)
        config = dataclasses.replace(config, model=model.source, heads=kind)
    if made is None:
        return config
    looks = EmbeddingConfig(
        form=made.form,  # type: ignore[arg-type]
        dim=made.dim if made.form == "latent" else EmbeddingConfig.dim,
        widths=made.widths,
        shrink=made.shrink,
        task_gradient=made.task_gradient,
        kept=made.kept if isinstance(made, NetworkEmbedding) else None,
    )
    return dataclasses.replace(config, embedding=looks)


def model_options(model: ModelConfig) -> dict[str, Any]:
    """What `create_model` passes on to the base network: the options that are not at default."""
    chosen = {
        "wide": model.wide if model.wide != 1.0 else None,
        "widths": model.widths,
        "block": model.block,
        "gate_last": model.gate_last,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def check_precision(model: DeepMoE) -> None:
    """Refuses a model in a precision that no checkpoint is read back in."""
    dtype = next(model.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"models are kept in single or double precision, not {dtype}: call .float()"
        )
