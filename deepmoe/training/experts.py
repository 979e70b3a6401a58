"""What experts start with: a trained network's weights, and clusters of its features."""

import torch
from torch import Tensor

from deepmoe.config import RunConfig
from deepmoe.data import Loader
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import batches_for
from deepmoe.hard_moe import HardMoE, nearest
from deepmoe.model import DeepMoE
from deepmoe.training.codebook_learning import cluster

MOST_IMAGES = 20_000
MOST_VALUES = 50_000_000  # of all features together: 200 MB


def check_devices(config: RunConfig, devices: int) -> None:
    """Refuses experts on several devices: each would wait for gradients of experts it did not run.

    Args:
        config: of the run.
        devices: on all nodes.
    """
    if config.model.experts is not None and devices > 1:
        raise UserError(f"experts are trained on one device, not on {devices}")


def start_experts(model: HardMoE, start: DeepMoE, path: str) -> None:
    """Makes a trained network the start of every expert, and what makes the features.

    A start that has experts itself is taken as it is, with its clusters.

    Args:
        model: to fill.
        start: the trained network, without gates.
        path: of its checkpoint.
    """
    if start.gated:
        raise UserError(f"{path} has gates, but experts have none: give one with model.gates=none")
    wholes = [m.unpruned or m.gating.graph for m in (model, start)]
    if len({tuple(group.width for group in whole.groups) for whole in wholes}) > 1:
        # What is left of both may be alike, but costs would be shares of another network's.
        raise UserError(f"the network that {path} was pruned from has different layers or widths")
    try:
        if isinstance(start, HardMoE):
            model.load_state_dict(start.state_dict())
            return
        for expert in model.network:
            expert.load_state_dict(start.network.state_dict())
    except RuntimeError as error:
        raise UserError(f"the base network of {path} has different layers or widths") from error
    weights = start.network.state_dict()
    own = model.embedding.network.state_dict()
    model.embedding.network.load_state_dict({name: weights[name] for name in own})
    model.centroids.zero_()  # of other features, if there were any


def learn_centroids(model: HardMoE, images: Loader, seed: int) -> str:
    """Cuts training images into clusters by their features, and gives each an expert.

    Args:
        model: with features; its centroids are set.
        images: to learn from, as the experts will see them.
        seed: of the clustering.

    Returns:
        How the images are shared out, for people.

    Raises:
        UserError: where some expert would have no images to learn from.
    """
    experts = len(model.centroids)
    features_ND = features_of_images(model, images)
    if len(features_ND) < experts:
        raise UserError(f"{experts} experts can't share {len(features_ND)} training images")
    clusters_N = cluster(features_ND, experts, seed)
    found = [features_ND[clusters_N == c].double().mean(dim=0) for c in clusters_N.unique()]
    centroids_KD = torch.stack(found).to(features_ND.dtype)
    counts = nearest(features_ND, centroids_KD).bincount(minlength=experts)
    if len(found) < experts or not bool(counts.all()):
        # Not silently: an expert that is never run would keep its start's weights.
        raise UserError(
            f"the training images fall into {int(counts.count_nonzero())} clusters at most, too "
            f"few for {experts} experts: set model.experts to fewer"
        )
    model.centroids.copy_(centroids_KD)
    shares = counts.double() / counts.sum()
    return (
        f"clusters of {len(features_ND):,} training images: the smallest has {shares.min():.1%} of "
        f"them, the largest {shares.max():.1%}"
    )


@torch.no_grad()
def features_of_images(model: HardMoE, images: Loader) -> Tensor:
    """The features of some training images, augmented as in training; in a mixed order."""
    most = max(1, min(MOST_IMAGES, MOST_VALUES // model.embedding.dim))
    found = [
        model.embedding(x_BCHW).float().cpu()
        for x_BCHW, _ in batches_for(model, images.epoch(0), most, "clustering images")
    ]
    return torch.cat(found)
