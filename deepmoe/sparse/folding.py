"""A base network as plain convolutions: batch norm folded into weights and biases."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from deepmoe.backbones import Backbone
from deepmoe.backbones.base import ANY_SIZE
from deepmoe.layers import GatedConv
from deepmoe.layers.description import conv_output_size


@dataclass(frozen=True)
class FoldedLayer:
    """A convolution (or linear classifier) with batch norm inside, and the gates around it."""

    weight: Tensor  # (O, I, K, K), or (O, I) of a linear layer
    bias: Tensor | None
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    relu: bool = False
    in_gate: int | None = None  # which gate scales the input channels
    out_gate: int | None = None  # which gate scales the output channels

    @property
    def is_conv(self) -> bool:
        return self.weight.ndim == 4

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a convolution's output for an input of this size."""
        geometry = (self.weight.shape[2:], self.stride, self.padding, self.dilation)
        return conv_output_size((height, width), *geometry)

    def take(self, outputs: Tensor | None, inputs: Tensor | None) -> Self:
        """The layer of these output and input channels alone; `None` takes all of them."""
        weight, bias = self.weight, self.bias
        if outputs is not None:
            weight = weight.index_select(0, outputs)
            bias = None if bias is None else bias.index_select(0, outputs)
        if inputs is not None:
            weight = weight.index_select(1, inputs)
        return replace(self, weight=weight, bias=bias)


def fold(backbone: Backbone, dtype: torch.dtype) -> dict[str, FoldedLayer]:
    """Every layer of a network by its path, as evaluation runs it."""
    folded = {}
    for layer in backbone.layers(*ANY_SIZE):
        found = _fold_module(backbone.get_submodule(layer.path), dtype)
        folded[layer.path] = replace(found, in_gate=layer.in_gate, out_gate=layer.out_gate)
    return _with_biases_moved(folded, backbone.additions())


def _in_best_format(layer: FoldedLayer) -> FoldedLayer:
    """GPUs like channels last; on a CPU, the taps of a kernel lie together."""
    if not layer.is_conv:
        return layer
    best = torch.channels_last if layer.weight.is_cuda else torch.contiguous_format
    return replace(layer, weight=layer.weight.contiguous(memory_format=best))


def _with_biases_moved(
    layers: dict[str, FoldedLayer], additions: list[tuple[str, str]]
) -> dict[str, FoldedLayer]:
    """The convolution that is added to a shortcut adds its bias too, where no gate would scale it.

    That saves a pass over the residual stream.
    """
    moved = dict(layers)
    for shortcut, last in additions:
        bias, onto = layers[shortcut].bias, layers[last].bias
        if layers[last].out_gate is None and bias is not None and onto is not None:
            moved[shortcut] = replace(layers[shortcut], bias=None)
            moved[last] = replace(layers[last], bias=onto + bias)
    return moved


def fold_conv(module: GatedConv, dtype: torch.dtype) -> FoldedLayer:
    """A gated convolution with its batch norm in the weights."""
    scale, bias = norm_as_affine(module)
    weight = module.conv.weight.detach().double() * scale[:, None, None, None]
    geometry = _geometry(module.conv)
    folded = FoldedLayer(weight.to(dtype), bias.to(dtype), **geometry, relu=module.relu)
    return _in_best_format(folded)


def bare_conv(module: GatedConv, dtype: torch.dtype) -> FoldedLayer:
    """A gated convolution without its batch norm and ReLU."""
    weight = module.conv.weight.detach().to(dtype)
    return _in_best_format(FoldedLayer(weight, None, **_geometry(module.conv)))


def norm_as_affine(module: GatedConv) -> tuple[Tensor, Tensor]:
    """Scale and bias of the batch norm, in double precision: they add no error to speak of."""
    bn = module.bn
    assert bn.running_mean is not None and bn.running_var is not None
    scale = bn.weight.detach().double() / (bn.running_var.double() + bn.eps).sqrt()
    return scale, bn.bias.detach().double() - bn.running_mean.double() * scale


def _fold_module(module: nn.Module, dtype: torch.dtype) -> FoldedLayer:
    if isinstance(module, GatedConv):
        return fold_conv(module, dtype)
    assert isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None
    geometry = _geometry(module) if isinstance(module, nn.Conv2d) else {}
    weight, bias = module.weight.detach().to(dtype), module.bias.detach().to(dtype)
    return _in_best_format(FoldedLayer(weight, bias, **geometry))


def _geometry(conv: nn.Conv2d) -> dict[str, Any]:
    assert not isinstance(conv.padding, str)
    return {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
