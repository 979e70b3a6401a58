"""Gates for networks that were never trained: images take different routes of a given density."""

import torch
from torch import Tensor

from deepmoe.errors import UserError
from deepmoe.layers import GateHeads, RouteCodebook, ShallowEmbedding
from deepmoe.model import DeepMoE

SHARPNESS = 1e4  # mixture weights are all but one-hot


@torch.no_grad()
def set_routes(
    model: DeepMoE, size: tuple[int, int], density: float, *, images: int = 32, seed: int = 0
) -> None:
    """Makes an untrained model route random images apart, over this share of each layer's channels.

    Each mixture weight stands for one random route; the embedding is set so that each of many
    random images has nearly all weight on one of them.

    Args:
        model: with ReLU heads; its embedding's last layer and its heads are set.
        size: of images.
        density: share of each layer's channels that a route runs, 0 to 1.
        images: random ones that the embedding is fitted to.
        seed: of routes and images.
    """
    if not isinstance(model.embedding, ShallowEmbedding) or not isinstance(model.heads, GateHeads):
        raise UserError("routes can be set for models with a shallow embedding and relu heads only")
    device = model.heads.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    weight, routes = model.heads.weight, model.heads.weight.shape[1]
    random = torch.rand(weight.shape, generator=generator, device=device)
    start = 0
    for width in model.heads.widths:
        layer = slice(start, start + width)
        runs = round(density * width)
        # As many channels as asked for, exactly: those whose random number is among the largest.
        ranks = random[layer].argsort(dim=0, descending=True).argsort(dim=0)
        weight[layer] = torch.where(ranks < runs, 0.5 + random[layer], -1.0)
        start += width
    x = torch.randn(images, model.gating.graph.colours, *size, generator=generator, device=device)
    project = model.embedding.project
    features = torch.cat([_features(model.embedding, part) for part in x.split(8)])
    mean, std = features.mean(dim=0), features.std(dim=0).clamp_min(1e-6)
    directions = torch.randn(routes, len(mean), generator=generator, device=device)
    project.weight.copy_(SHARPNESS * directions / std)
    project.bias.copy_(-(project.weight @ mean))


def routes_as_codebook(model: DeepMoE) -> DeepMoE:
    """The model with a codebook of the routes that its heads know."""
    assert isinstance(model.heads, GateHeads)
    codes_KC = model.heads.weight.detach().T.relu()
    book = RouteCodebook(codes_KC, torch.ones_like(codes_KC[0]), model.heads.widths)
    return model.with_gates(codebook=book).eval()


def _features(embedding: ShallowEmbedding, x_BCHW: Tensor) -> Tensor:
    looked_at = embedding.shrunk(x_BCHW.to(embedding.project.weight.dtype))
    return embedding.convs(looked_at).mean(dim=(2, 3))
