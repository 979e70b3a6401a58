"""Scales of batch norms that gates can take over."""

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from deepmoe.graph.gating import Gating
from deepmoe.graph.graph import Layer
from deepmoe.graph.operations import name_of

# What a positive factor may pass: f(g x) = g f(x).
HOMOGENEOUS = {
    *("relu", "identity", "contiguous", "dropout", "dropout2d", "featuredropout"),
    *("maxpool2d", "avgpool2d", "adaptiveavgpool2d", "adaptivemaxpool2d", "mean", "flatten"),
}
LEAST_SCALE = 1e-2  # below, an offset could not be had by way of the scale


@torch.no_grad()
def absorb_scales(network: nn.Module, gating: Gating) -> dict[int, Tensor]:
    """Fixes scales of batch norms at 1, for gates to take their place.

    That is done where a group's one maker is followed by a batch norm, and nothing lies between
    this and the gates but what a positive factor can pass. Offsets are divided by the scales, and
    filters turned round where a scale is negative: under gates of the values that are returned, the
    network computes what it did, but for scales that are nearly 0.

    Args:
        network: is changed.
        gating: of the network.

    Returns:
        By the number of a gate, the value for each of its units.
    """
    taken = {}
    with torch.device("cpu"):  # numbers of channels, also of a network without weights
        norms = norms_before_gates(gating)
    for gate, (layer, path) in norms.items():
        maker, norm = network.get_submodule(layer.path), network.get_submodule(path)
        assert isinstance(norm, nn.BatchNorm2d) and isinstance(maker.weight, nn.Parameter)
        sign = torch.where(norm.weight < 0, -1.0, 1.0).to(norm.weight.dtype)
        scale = norm.weight.abs().clamp_min(LEAST_SCALE)
        maker.weight.mul_(sign.view(-1, *[1] * (maker.weight.dim() - 1)))
        for turned in (maker.bias, norm.running_mean):
            if isinstance(turned, Tensor):
                turned.mul_(sign)
        norm.bias.div_(scale)
        norm.weight.fill_(1.0).requires_grad_(False)
        first = gating.graph.offsets[gating.gated[gate]]
        units = (layer.outs - first).to(scale.device)
        taken[gate] = torch.ones_like(scale).index_copy_(0, units, scale)
    return taken


def norms_before_gates(gating: Gating) -> dict[int, tuple[Layer, str]]:
    """By the number of a gate, the maker of its channels and the path of the norm behind it."""
    graph, found = gating.graph, {}
    nodes = {node.name: node for node in graph.program.nodes}
    layers = {layer.node: layer for layer in graph.layers}
    for gate, number in enumerate(gating.gated):
        group, first = graph.groups[number], graph.offsets[number]
        layer = next(layer for layer in graph.layers if layer.path == group.makers[0])
        units = torch.arange(first, first + group.width)
        one_maker = len(group.makers) == 1 and torch.equal(layer.outs.sort().values, units)
        users = list(nodes[layer.node].users)
        if not one_maker or len(users) != 1 or users[0].op != "call_module":
            continue
        norm = graph.skeleton.get_submodule(str(users[0].target))
        if not isinstance(norm, nn.BatchNorm2d) or not norm.affine:
            continue
        ends = list(_first_others(users[0], graph.skeleton))
        if all(end.name in layers and not layers[end.name].passes_on for end in ends):
            found[gate] = (layer, str(users[0].target))
    return found


def _first_others(node: fx.Node, root: nn.Module) -> Iterator[fx.Node]:
    """The operations behind a node, where what a factor can pass is left out."""
    for user in node.users:
        if user.op.startswith("call") and name_of(user, root) in HOMOGENEOUS:
            yield from _first_others(user, root)
        else:
            yield user
