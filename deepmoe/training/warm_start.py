"""Warm starts: the weights of a trained network to begin with."""

from deepmoe.config import RunConfig
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.graph import channel_strengths
from deepmoe.layers import GateHeads
from deepmoe.model import DeepMoE
from deepmoe.training.teachers import load_trained


def start_from(path: str, model: DeepMoE, info: DataInfo, config: RunConfig) -> None:
    """Copies a checkpoint's weights: of the base network, and of the routing if both have it.

    Gates that start from an ungated network are handed out by its channels' strengths.

    Args:
        path: of the checkpoint.
        model: to fill.
        info: of the data to train on.
        config: of the run.

    Raises:
        UserError: where the checkpoint does not fit the model, or knows held-out images.
    """
    start = load_trained("train.start", path, model, info, config).model
    if not config.train.epochs and model.gated and not start.gated:
        raise UserError(f"{path} has no gates, and without a joint stage none would be trained")
    try:
        model.network.load_state_dict(start.network.state_dict())
    except RuntimeError as error:
        raise UserError(f"the base network of {path} has other layers or widths") from error
    if isinstance(model.heads, GateHeads) and not start.gated:
        model.heads.order_by_strength(channel_strengths(model.network, model.gating))
    if not model.gated or not start.gated:
        return
    try:
        for module, trained in zip(model.routing_modules(), start.routing_modules(), strict=True):
            module.load_state_dict(trained.state_dict())
    except RuntimeError as error:
        raise UserError(f"embedding or gates of {path} have another form or size") from error
    if start.thresholds is not None:
        model.thresholds = start.thresholds.to(next(model.parameters()))
