"""A network told to people: its layers, the groups of channels it consists of, gates and costs."""

from typing import Any

import torch
from torch import nn

from deepmoe.costs import Size, as_pair, count_costs
from deepmoe.graph import Gating, Group, Layer, why_not
from deepmoe.hard_moe import HardMoE
from deepmoe.model import DeepMoE


def description(model: DeepMoE, size: Size) -> dict[str, Any]:
    """What a model consists of, as plain values.

    Args:
        model: gated, dense, or of experts: groups and layers are then those of each.
        size: of images, for the costs.
    """
    gating, pair = model.gating, as_pair(size)
    macs = gating.graph.macs(pair)
    costs = count_costs(model, pair)
    experts = {"experts": len(model.centroids)} if isinstance(model, HardMoE) else {}
    return {
        "input": list(pair),
        "classes": model.classes,
        **experts,
        "params": costs.params,
        "macs": costs.macs,
        "embedding_macs": costs.embedding_macs,
        "gate_macs": costs.gate_macs,
        "gated_groups": len(gating.widths),
        "gates": sum(gating.widths),
        "gated_share": gated_share(gating, pair),
        "groups": [_group(gating, group, macs) for group in gating.graph.groups],
        "layers": [_layer(model.one_network, layer, macs) for layer in gating.graph.layers],
    }


def gated_share(gating: Gating, size: Size) -> float:
    """The share of the network's MACs in layers that read or make gated channels."""
    macs = gating.graph.macs(as_pair(size))
    layers = gating.graph.layers
    under = sum(macs[layer.path] for layer in layers if _is_under_gates(gating, layer))
    return under / max(1, sum(macs.values()))


def _is_under_gates(gating: Gating, layer: Layer) -> bool:
    units = torch.cat([layer.ins, layer.outs])
    return bool((gating.gate_of_channel(units) >= 0).any())


def _group(gating: Gating, group: Group, macs: dict[str, int]) -> dict[str, Any]:
    gated = group.number in gating.gated
    touched = sum(macs[path] for path in {*group.makers, *group.readers})
    return {
        "number": group.number,
        "name": group.name,
        "gates": group.width,
        "made_by": list(group.makers),
        "read_by": list(group.readers),
        "macs": touched,  # of the layers that make it or read it
        "gated": gated,
        "why_not": None if gated else why_not(gating.graph, group) or _left_out(group),
    }


def _left_out(group: Group) -> str:
    return "reaches a residual stream" if group.is_stream else "was not asked for"


def _layer(network: nn.Module, layer: Layer, macs: dict[str, int]) -> dict[str, Any]:
    module = network.get_submodule(layer.path)
    kind = type(module).__name__.lower()
    if isinstance(module, nn.Conv2d):
        height, width = module.kernel_size
        stride = "" if module.stride == (1, 1) else f", stride {module.stride[0]}"
        groups = "" if module.groups == 1 else f", {module.groups} groups"
        kind = f"conv {height}x{width}{stride}{groups}"
    return {
        "name": layer.path,
        "kind": kind,
        "inputs": len(layer.ins),
        "outputs": len(layer.outs),
        "macs": macs[layer.path],
    }
