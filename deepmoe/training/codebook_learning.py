"""Learning a route codebook: the gates of many images, clustered into a few routes."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepmoe.costs import cost_matrix, marginal_macs
from deepmoe.data import Batch
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import gates_of_images
from deepmoe.layers import RouteCodebook
from deepmoe.layers.heads import project
from deepmoe.model import DeepMoE

MOST_IMAGES = 8192
MOST_FEATURES = 512  # wider features are projected: distances change by a few percent
PROJECTED_AT_ONCE = 1024  # images, so that the features of all of them never lie in memory
STARTS = 4  # of the clustering, of which the best is taken


def learn_codebook(
    model: DeepMoE,
    batches: Iterable[Batch],
    codes: int,
    size: tuple[int, int],
    seed: int = 0,
    images: int = MOST_IMAGES,
) -> RouteCodebook:
    """Finds routes that stand for those of given images.

    A code costs about the mean of the images it is made from: in each layer it runs as many
    channels as they do on average.

    Args:
        model: gated; a codebook that it may have is not looked at.
        batches: images, normalised as in training, and labels.
        codes: how many routes to find; there are fewer where fewer differ.
        size: of the images, by which a channel's cost is counted.
        seed: of the clustering.
        images: how many of the images to use at most.

    Returns:
        The codebook, on the model's device.

    Raises:
        UserError: for a model without gates, or more codes than images.
    """
    if not model.gated:
        raise UserError("a codebook needs a gated model, but this one is dense")
    check_codes(codes)
    gates_NC = gates_of_images(model, batches, images).float().cpu()
    check_codes(codes, len(gates_NC))
    widths = model.gating.widths
    weight_C = _channel_weights(model, size)
    clusters = cluster(_narrow_features(gates_NC, weight_C, widths, seed), codes, seed)
    found = [_common_route(gates_NC[clusters == c], widths) for c in clusters.unique()]
    codes_KC = torch.stack(found).unique(dim=0)
    return RouteCodebook(codes_KC, weight_C, widths).to(next(model.parameters()).device)


def check_codes(codes: int, images: int | None = None) -> None:
    """Raises a UserError where so many codes can't be learnt (from so many images)."""
    if codes < 1:
        raise UserError(f"a codebook has at least 1 code, not {codes}")
    if images is not None and codes > images:
        raise UserError(f"{codes} codes can't be learnt from {images} images: ask for fewer")


def _channel_weights(model: DeepMoE, size: tuple[int, int]) -> Tensor:
    """What a channel of each layer costs at full width, one number a channel, 1 on average."""
    widths = torch.tensor(model.gating.widths)
    marginal_L = marginal_macs(cost_matrix(model.gating, size), widths.double())
    weight_C = marginal_L.repeat_interleave(widths)
    return (weight_C / weight_C.mean()).float()


def _narrow_features(
    gates_NC: Tensor, weight_C: Tensor, widths: Sequence[int], seed: int
) -> Tensor:
    """The features of routes; at random projected to fewer, which keeps distances, where many."""
    scale_C = RouteCodebook.scales(gates_NC, widths)
    wide = 2 * gates_NC.shape[1]
    if wide <= MOST_FEATURES:
        return RouteCodebook.features(gates_NC, scale_C, weight_C)
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(MOST_FEATURES, wide, generator=generator) / MOST_FEATURES**0.5
    parts = gates_NC.split(PROJECTED_AT_ONCE)
    features = (RouteCodebook.features(part, scale_C, weight_C) for part in parts)
    return torch.cat([project(part, projection) for part in features])


def cluster(features_NF: Tensor, clusters: int, seed: int) -> Tensor:
    """The cluster of each image; some clusters may have none."""
    from sklearn.cluster import KMeans  # slow to import, and most runs don't need it
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    means = KMeans(clusters, n_init=STARTS, random_state=seed)
    # Several threads would add up in any order: a resumed run could find other clusters.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer routes differ: we drop the rest
        return torch.from_numpy(means.fit_predict(features_NF.numpy())).long()


def _common_route(gates_NC: Tensor, widths: Sequence[int]) -> Tensor:
    """The route that stands for some images.

    Each layer runs as many channels as it does on average, those that most of the images run, with
    the mean gate of the images that run them.
    """
    votes_C = (gates_NC > 0).sum(dim=0)
    mean_C = gates_NC.sum(dim=0, dtype=torch.float64) / votes_C.clamp_min(1)
    layers = []
    for votes, mean in zip(votes_C.split(list(widths)), mean_C.split(list(widths)), strict=True):
        kept = int(votes.sum() / len(gates_NC) + 0.5)  # a half counts as a channel
        by_mean = mean.argsort(descending=True, stable=True)
        by_votes = by_mean[votes[by_mean].argsort(descending=True, stable=True)]
        code = torch.zeros_like(mean)
        code[by_votes[:kept]] = mean[by_votes[:kept]]
        layers.append(code)
    return torch.cat(layers).float()
