"""Gates that may multiply what a layer makes, in place of what others read."""

import torch
from torch import Tensor, fx, nn

from deepmoe.graph import Gating
from deepmoe.graph.graph import Layer
from deepmoe.graph.operations import NORMS, name_of
from deepmoe.graph.running import DROPOUTS
from deepmoe.sparse.folding import Side

# What a factor that is not negative may as well come before as after.
HOMOGENEOUS = {
    *("relu", "leakyrelu", "maxpool2d", "avgpool2d", "adaptiveavgpool2d", "adaptivemaxpool2d"),
    *("mean", "flatten", "view", "reshape", "squeeze", "cat", "identity", "contiguous", *DROPOUTS),
}


def hoisted_gates(gating: Gating) -> dict[str, int]:
    """Gates that may as well multiply what a layer makes as what others read, by its path.

    That is so where nothing but ReLU, pooling and the like lies between.
    """
    nodes = {node.name: node for node in gating.graph.program.nodes}
    layers = {layer.node: layer for layer in gating.graph.layers}
    origins: dict[str, set[str] | None] = {}  # of each reader, the layers that it reads
    for layer, site in zip(gating.graph.layers, gating.sites, strict=True):
        if site is not None:
            x = nodes[layer.node].args[0]
            assert isinstance(x, fx.Node)
            origins[layer.path] = _origins(x, layers, gating.graph.skeleton)
    makers = {
        layer.path: side_of(gating, layer.outs)
        for layer in gating.graph.layers
        if layer.is_conv and not layer.passes_on
    }
    good = {
        gate
        for gate, number in enumerate(gating.gated)
        if len(gating.graph.groups[number].makers) == 1
        and makers.get(gating.graph.groups[number].makers[0]) is gate
    }
    while True:
        wrong = set()
        for layer, site in zip(gating.graph.layers, gating.sites, strict=True):
            if site is not None:
                read = {int(g) for g in gating.gate_of_channel(layer.ins).unique() if g >= 0}
                if origins[layer.path] is None or not read <= good:
                    wrong |= read & good
        if not wrong:
            break
        good -= wrong
    return {gating.graph.groups[gating.gated[gate]].makers[0]: gate for gate in sorted(good)}


def all_hoisted(gating: Gating, layer: Layer, hoisted: dict[str, int]) -> bool:
    """Whether every gate of what a layer reads multiplies what another makes instead."""
    read = {int(g) for g in gating.gate_of_channel(layer.ins).unique() if g >= 0}
    return read <= set(hoisted.values())


def _origins(node: fx.Node, layers: dict[str, Layer], root: nn.Module) -> set[str] | None:
    """Paths of the layers that a node's values come from, scaled as they may be; else `None`."""
    if node.name in layers:
        layer = layers[node.name]
        return None if layer.passes_on else {layer.path}
    if not node.op.startswith("call"):
        return set() if node.op == "placeholder" else None
    name, source = name_of(node, root), node.args[0]
    if name in NORMS:
        if not isinstance(source, fx.Node) or source.name not in layers:
            return None
        if len(source.users) > 1 or not layers[source.name].is_conv:
            return None
        return _origins(source, layers, root)
    if name not in HOMOGENEOUS:
        return None
    sources = source if isinstance(source, list | tuple) else [source]
    found: set[str] = set()
    for part in sources:
        of_part = _origins(part, layers, root) if isinstance(part, fx.Node) else None
        if of_part is None:
            return None
        found |= of_part
    return found


def side_of(gating: Gating, units: Tensor) -> Side:
    """The gates of these units, as a folded layer has them."""
    gates = gating.gate_of_unit[units]
    if not bool((gates >= 0).any()):
        return None
    start = 0
    for number, width in enumerate(gating.widths):
        if len(gates) == width and torch.equal(gates, torch.arange(start, start + width)):
            return number
        start += width
    return gates
