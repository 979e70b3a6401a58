"""Warm starts: the weights of a trained network to begin with."""

import torch
from torch import Tensor, nn

from deepmoe.backbones import Backbone
from deepmoe.config import RunConfig
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.layers import GatedConv, GateHeads
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
    start = load_trained("train.start", path, info, config).model
    if not config.train.epochs and model.gated and not start.gated:
        raise UserError(f"{path} has no gates, and without a joint stage none would be trained")
    try:
        model.backbone.load_state_dict(start.backbone.state_dict())
    except RuntimeError as error:
        raise UserError(f"the base network of {path} has other layers or widths") from error
    if isinstance(model.heads, GateHeads) and not start.gated:
        model.heads.order_by_strength(channel_strengths(model.backbone, info.size))
    if not model.gated or not start.gated:
        return
    try:
        for module, trained in zip(model.routing_modules(), start.routing_modules(), strict=True):
            module.load_state_dict(trained.state_dict())
    except RuntimeError as error:
        raise UserError(f"embedding or gates of {path} have another form or size") from error
    if start.thresholds is not None:
        model.thresholds = start.thresholds.to(next(model.parameters()))


@torch.no_grad()
def channel_strengths(backbone: Backbone, size: tuple[int, int]) -> list[Tensor]:
    """How much the channels of each gated convolution matter to the layers behind.

    The scale that batch norm gives a channel, times the norm of the weights that read it. Outputs
    of residual blocks are read by all layers behind: there it is the scale alone.
    """
    layers = backbone.layers(*size)
    modules = {layer.path: backbone.get_submodule(layer.path) for layer in layers}
    strengths = []
    for gate, width in enumerate(backbone.gate_widths):
        scale, readers = torch.ones(width), []
        for layer in layers:
            module = modules[layer.path]
            if layer.out_gate == gate and isinstance(module, GatedConv):
                scale = module.bn.weight.abs().cpu()
            if layer.in_gate == gate:
                readers.append(_weight_of(module).transpose(0, 1).flatten(1).cpu())
        strengths.append(scale * torch.cat(readers, dim=1).norm(dim=1) if readers else scale)
    return strengths


def _weight_of(module: nn.Module) -> Tensor:
    weight = module.conv.weight if isinstance(module, GatedConv) else module.weight
    assert isinstance(weight, Tensor)
    return weight
