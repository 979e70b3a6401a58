"""What the sparse engine is measured on: untrained networks with given routes, or a checkpoint."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmoe.building import add_gates
from deepmoe.checkpoint import Checkpoint, load_checkpoint
from deepmoe.config import EmbeddingConfig, RunConfig, apply_overrides
from deepmoe.configured_models import model_from_config
from deepmoe.costs import count_costs
from deepmoe.data import open_data
from deepmoe.data.interface import Loader
from deepmoe.errors import UserError
from deepmoe.hard_moe import refuse_experts
from deepmoe.layers import ShallowEmbedding
from deepmoe.model import DeepMoE
from deepmoe.random_routes import routes_as_codebook, set_routes
from deepmoe.registry import create_model, list_models, usual_input
from deepmoe.training import learn_codebook


@dataclass(frozen=True)
class Subject:
    """What is measured: networks and the images they are given.

    Args:
        dynamic: with gates, exits or both, without a codebook.
        coded: the same network with a codebook, if that mode is measured.
        base: the dense network at its own width.
        images: a batch of the model's input.
    """

    dynamic: DeepMoE
    coded: DeepMoE | None
    base: DeepMoE
    images: Tensor


def untrained_subject(
    name: str,
    *,
    density: float,
    batch: int,
    codes: int | None,
    size: tuple[int, int] | None,
    device: str,
    options: dict[str, Any],
    seed: int = 0,
) -> Subject:
    """A network with random weights and random routes of a given density.

    Args:
        name: of the model.
        density: share of each layer's channels that a route runs.
        batch: number of (random) images.
        codes: routes of the codebook; `None` leaves that mode out.
        size: of the images; the model's usual one if not given.
        device: to run on.
        options: of the base network, such as `wide`.
        seed: of weights, routes and images.
    """
    if not 0 <= density <= 1 or batch < 1 or (codes is not None and codes < 1):
        raise UserError("density lies from 0 to 1, and batch and codes are at least 1")
    torch.manual_seed(seed)
    model = create_model(name, size=size, **options).eval().to(device)
    size = size or usual_input(model)
    count_costs(model, size)  # tells if images are too small for the network
    set_routes(model, size, density, seed=seed)
    coded = None
    if codes is not None:
        assert isinstance(model.embedding, ShallowEmbedding)
        widths = model.embedding.widths
        embedding = EmbeddingConfig(form="latent", dim=codes, widths=widths)
        coded = add_gates(model.network, model.gating, embedding, None, widths, model.source)
        coded = coded.eval().to(device)
        set_routes(coded, size, density, seed=seed)
        coded = routes_as_codebook(coded)
    own_width = {key: v for key, v in options.items() if key not in ("wide", "widths")}
    base = create_model(name, gates=None, size=size, **own_width).eval().to(device)
    return Subject(
        model, coded, base, torch.randn(batch, model.gating.graph.colours, *size, device=device)
    )


def trained_subject(
    checkpoint: Path,
    *,
    batch: int,
    codes: int | None,
    device: str,
    data: tuple[str, ...] = (),
    network: str | None = None,
) -> Subject:
    """A trained model with its own gates and exits, on images of its evaluation data.

    Args:
        checkpoint: its file.
        batch: number of images.
        codes: routes of a codebook to learn, where the model has none.
        device: to run on.
        data: changes of the configuration, such as `data.root=...`.
        network: what makes its base network, where that is not of the zoo.
    """
    loaded = load_checkpoint(checkpoint, network=network)
    config = apply_overrides(loaded.config, data)
    loaded.model.check_ahead()
    refuse_experts(loaded.model, "there are no channels to skip, which is what is timed here")
    if not loaded.model.gated and loaded.model.exit_at is None:
        raise UserError(f"{checkpoint} holds a network without gates and exits: nothing to skip")
    opened = open_data(
        config.data, batch_size=batch, device=torch.device(device), info=loaded.info, calibrate=True
    )
    images = _first_images(opened.evaluation, batch)
    model = loaded.model.to(device).eval()
    coded = model if model.codebook is not None else None
    if coded is None and codes is not None:
        book = learn_codebook(model, opened.calibration, codes, loaded.info.size)
        coded = model.with_gates(codebook=book, thresholds=model.thresholds)
    plain = model.with_gates(thresholds=model.thresholds)
    base = _at_own_width(config, loaded)
    return Subject(plain, coded, base.eval().to(device), images)


def _at_own_width(config: RunConfig, loaded: Checkpoint) -> DeepMoE:
    """The dense network that was made wide or pruned, or such a network itself."""
    model = loaded.model
    if config.model.name not in list_models():
        source = replace(model.source, gates="none")
        return DeepMoE(None, None, model.network, model.gating, source=source)
    own_width = replace(config.model, wide=1.0, widths=None, kept=None, exits=False)
    return model_from_config(replace(config, model=own_width).dense, loaded.info.classes)


def _first_images(loader: Loader, count: int) -> Tensor:
    found: list[Tensor] = []
    for images, _ in loader:
        found.append(images)
        if sum(map(len, found)) >= count:
            break
    return torch.cat(found)[:count]
