"""Which plain network a model is handed over as: its savings depend on that."""

import copy
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn

from deepmoe.checkpoint import Checkpoint
from deepmoe.config import GIVEN
from deepmoe.configured_models import model_from_config
from deepmoe.deploy import CodedNetwork, ExitingNetwork, ExpertNetworks, Logits, static_network
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import Batches, batches_for
from deepmoe.hard_moe import HardMoE
from deepmoe.model import DeepMoE
from deepmoe.training.codebook_learning import learn_codebook

MOST_CODES = 64
Route = Literal["static", "codes"]
ROUTES: tuple[Route, ...] = get_args(Route)
ALIKE_IMAGES = 200  # training images that a common route is tried on
ALIKE = 0.9  # of these images must keep their class under a common route


@dataclass(frozen=True)
class Deployed:
    """A network to hand over.

    Attributes:
        network: plain, in evaluation mode and single precision.
        told: what it is, in words.
        route: by which it was made; `None` where the model has no gates to choose from.
        one_image: whether it takes one image at a time, since what runs depends on the image.
    """

    network: nn.Module
    told: str
    route: Route | None = None
    one_image: bool = False


def needs_images(model: DeepMoE, route: Route | None, codes: int | None) -> bool:
    """Whether training images must be looked at to find routes."""
    return model.gated and (codes is not None or (route or _usual_route(model)) == "static")


def with_codes(model: DeepMoE, codes: int, images: Batches, size: tuple[int, int]) -> DeepMoE:
    """The model with so many routes at most, which are found on training images."""
    model.check_ahead()
    if not model.gated:
        raise UserError("the model has no gates, and so no codes: leave out --codes")
    if model.codebook is not None:
        raise UserError("the model has codes of its own: leave out --codes")
    if not 1 <= codes <= MOST_CODES:
        raise UserError(f"--codes must be from 1 to {MOST_CODES}, not {codes}")
    book = learn_codebook(model, images, codes, size)
    return model.with_gates(codebook=book, thresholds=model.thresholds)


def deployed(
    model: DeepMoE,
    route: Route | None,
    images: Batches,
    size: tuple[int, int],
) -> Deployed:
    """The network that a model is handed over as.

    Args:
        model: in evaluation mode.
        route: `static`: what most images run, for all of them. `codes`: that of the image's code.
            `None`: codes where the model has some.
        images: of training, to find a static route.
        size: of the images.

    Raises:
        UserError: for gates that no route is known of, or codes that are not there.
    """
    model.check_ahead()
    if isinstance(model, HardMoE):
        if route is not None:
            raise UserError("a model of experts has no route to choose: leave out --route")
        told = f"{len(model.centroids)} experts, of which each image runs one"
        return Deployed(ExpertNetworks(model).float(), told, one_image=True)
    exits = model.exit_at is not None
    end = ", behind exits" if exits else ""
    if not model.gated:
        if route == "codes":
            raise UserError("the model has no gates, and so no codes: leave out --route")
        network = ExitingNetwork(model) if exits else _copy(model.network)
        kept = "all channels" if model.unpruned is None else "the channels that pruning has left"
        return Deployed(network.float(), kept + end, one_image=exits)
    if (route or _usual_route(model)) == "codes":
        if model.codebook is None:
            raise UserError(
                "the model has no codes: --codes 4 finds some on training images, and training "
                "with train.codes also fits the network to them"
            )
        network = ExitingNetwork(model) if exits else CodedNetwork(model)
        told = f"a network for each of {len(model.codebook.codes)} codes{end}"
        return Deployed(network.float(), told, "codes", one_image=True)
    gates_C = learn_codebook(model, images, 1, size).codes[0]  # one that stands for all images
    network = static_network(model, gates_C)
    _check_alike(model, network, images)
    if exits:
        plain = DeepMoE(
            *(model.embedding, None, network, model.gating),
            exit_at=model.exit_at,
            exit_vote=model.exit_vote,
        )
        network = ExitingNetwork(plain)
    share = float((gates_C != 0).double().mean())
    told = f"the {share:.1%} of the gated channels that most images run, for all images{end}"
    return Deployed(network.float(), told, "static", exits)


@torch.no_grad()
def _check_alike(model: DeepMoE, network: nn.Module, images: Batches) -> None:
    """Refuses a common route where images differ too much in what they run."""
    same = all_ = 0
    for x_BCHW, _ in batches_for(model, images, ALIKE_IMAGES, "trying the route"):
        gates, _ = model.route(x_BCHW)
        own = model.gating(model.network, x_BCHW, gates).argmax(dim=1)
        same += int((network(x_BCHW).argmax(dim=1) == own).sum())
        all_ += own.numel()
    if same < ALIKE * all_:
        what = "pixels" if own.dim() > 1 else "images"
        raise UserError(
            f"images differ in the channels that they run: with one route for all, "
            f"{same / all_:.0%} of the training {what} keep the class that the model gives them; "
            "use --route codes --codes 4"
        )


def dense_network(loaded: Checkpoint) -> nn.Module:
    """The network with all channels, those included that were removed for good.

    Their weights are gone, so that it has new ones: it can be timed, and no more.
    """
    model, config = loaded.model, loaded.config
    if model.unpruned is None or config.model.name == GIVEN:
        return _copy(model.one_network).float()
    whole = replace(config.model, kept=None, exits=False, pretrained=False)
    config = replace(config, model=whole).dense
    made = model_from_config(config, loaded.info.classes, size=loaded.info.size, weights=False)
    return _copy(made.network).float()


def _usual_route(model: DeepMoE) -> Route:
    return "static" if model.codebook is None else "codes"


def _copy(network: nn.Module) -> nn.Module:
    return Logits(copy.deepcopy(network)).cpu().eval()
