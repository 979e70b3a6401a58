"""One folded convolution as a single call of the device's library: bias, ReLU and sum included."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.ops import is_half, scale_channels
from deepmoe.sparse.few_inputs import ImageConvolution, has_triton
from deepmoe.sparse.folding import ACTIVATIONS, FoldedLayer

# What oneDNN calls activations, and the numbers that it takes with them.
IN_ONEDNN: dict[str, tuple[str, list[float]]] = {
    "": ("none", []),
    "relu": ("relu", []),
    "relu6": ("hardtanh", [0.0, 6.0]),
    "silu": ("swish", []),
    "hardswish": ("hardswish", []),
}


class Convolution:
    """A convolution with fixed weights, brought once into the layout that its library likes best.

    Args:
        layer: weights, bias and geometry.
    """

    def __init__(self, layer: FoldedLayer) -> None:
        self.images = ImageConvolution(layer) if ImageConvolution.takes(layer) else None
        self.layer = layer if self.images is None else self.images.layer
        self.weight = self.layer.weight
        if self.weight.is_cuda:
            self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self.packed = False

    def __call__(
        self, x_BCHW: Tensor, onto_BCHW: Tensor | None = None, gate_BC: Tensor | None = None
    ) -> Tensor:
        """The convolution with what is added to it, and its ReLU.

        Args:
            x_BCHW: its input.
            onto_BCHW: added before the ReLU.
            gate_BC: multiplies the channels at last; not together with `onto_BCHW`.
        """
        assert onto_BCHW is None or gate_BC is None
        if self.images is not None:
            x_BCHW = self.images.patches_of(x_BCHW)
        elif not self.packed and onednn_runs(x_BCHW):
            self._pack(x_BCHW)
        if gate_BC is None:
            return convolve(self.layer, self.weight, x_BCHW, onto_BCHW)
        return convolve_gated(self.layer, self.weight, x_BCHW, gate_BC)

    def _pack(self, x_BCHW: Tensor) -> None:
        layer = self.layer
        self.weight = torch._C._nn.mkldnn_reorder_conv2d_weight(  # type: ignore[call-arg]
            self.weight.to_mkldnn(),
            list(layer.padding),
            list(layer.stride),
            list(layer.dilation),
            layer.groups,
            x_BCHW.shape,
        )
        self.packed = True
        # The layer's shapes are still needed, its weights are not: they would be there twice.
        nothing = layer.weight.new_empty(()).expand(layer.weight.shape)
        self.layer = replace(layer, weight=nothing)


def convolve(
    layer: FoldedLayer, weight: Tensor, x_BCHW: Tensor, onto_BCHW: Tensor | None = None
) -> Tensor:
    """A convolution of the layer's geometry, bias and ReLU with these weights."""
    if onednn_runs(x_BCHW):
        return _by_onednn(layer, weight, x_BCHW, onto_BCHW)
    if layer.relu and layer.groups == 1 and cudnn_runs(x_BCHW):
        return _by_cudnn(layer, weight, x_BCHW, onto_BCHW)
    return convolve_plainly(layer, weight, x_BCHW, onto_BCHW)


def convolve_gated(layer: FoldedLayer, weight: Tensor, x_BCHW: Tensor, gate_BC: Tensor) -> Tensor:
    """The same, its channels multiplied by gates."""
    if not cudnn_runs(x_BCHW):
        return scale_channels(convolve(layer, weight, x_BCHW), gate_BC)
    from deepmoe.sparse.triton_kernels import finish_

    # The gates take a pass over the output in any case, and it may as well add the bias.
    y = F.conv2d(x_BCHW, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    y = y.contiguous(memory_format=torch.channels_last)
    if layer.activation in ("", "relu"):
        return finish_(y, bias=layer.bias, gate=gate_BC, relu=layer.relu)
    return scale_channels(layer.activate_other(finish_(y, bias=layer.bias)), gate_BC)


def convolve_plainly(
    layer: FoldedLayer, weight: Tensor, x_BCHW: Tensor, onto_BCHW: Tensor | None = None
) -> Tensor:
    """The same by PyTorch's own operators, one after the other."""
    y = F.conv2d(
        x_BCHW, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    if onto_BCHW is not None:
        y = y + onto_BCHW
    return ACTIVATIONS[layer.activation](y)


def is_product(layer: FoldedLayer, x_BCHW: Tensor) -> bool:
    """Whether a convolution is a product of matrices, on a CPU: that takes weights as they lie."""
    return (
        x_BCHW.device.type == "cpu"
        and layer.groups == 1
        and layer.weight.shape[2:] == (1, 1)
        and layer.stride == (1, 1)
        and layer.padding == (0, 0)
    )


def convolve_as_product(
    weight_OI: Tensor,
    bias: Tensor | None,
    activation: str,
    x_BCHW: Tensor,
    onto_BCHW: Tensor | None = None,
) -> Tensor:
    """The same as `convolve`, for an input that lies channels last."""
    y_BHWC = F.linear(x_BCHW.permute(0, 2, 3, 1), weight_OI, bias)
    y_BCHW = y_BHWC.permute(0, 3, 1, 2)
    if onto_BCHW is not None:
        y_BCHW = y_BCHW.add_(onto_BCHW)
    return ACTIVATIONS[activation](y_BCHW)


def onednn_runs(x: Tensor) -> bool:
    """Whether oneDNN's fused convolution takes this tensor."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and _fused_by_onednn()


def cudnn_runs(x: Tensor) -> bool:
    """Whether cuDNN's fused convolution and the kernels beside it take this tensor."""
    return x.is_cuda and is_half(x.dtype) and has_triton() and _fused_by_cudnn(x.device, x.dtype)


@cache
def _fused_by_onednn() -> bool:
    """Not in every build of PyTorch, such as some for ARM."""
    return torch.backends.mkldnn.is_available() and _is_right(
        _by_onednn, torch.device("cpu"), torch.float32
    )


@cache
def _fused_by_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    return torch.backends.cudnn.is_available() and _is_right(_by_cudnn, device, dtype)


def _is_right(fused: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Tries a fused operator, with a sum and without: both are private, and may change or go."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator).to(device, dtype)
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x

    x, onto = random(2, 8, 6, 6), random(2, 8, 6, 6)
    layer = FoldedLayer(random(8, 8, 3, 3), random(8), padding=(1, 1), activation="relu")
    try:
        return all(
            torch.allclose(
                fused(layer, layer.weight, x, added),
                convolve_plainly(layer, layer.weight, x, added),
                rtol=0.05,
                atol=0.05,
            )
            for added in (None, onto)
        )
    except (RuntimeError, AttributeError, TypeError):
        return False


def _by_onednn(
    layer: FoldedLayer, weight: Tensor, x_BCHW: Tensor, onto_BCHW: Tensor | None
) -> Tensor:
    shape = (layer.padding, layer.stride, layer.dilation, layer.groups)
    if onto_BCHW is None:
        return torch.ops.mkldnn._convolution_pointwise(
            x_BCHW, weight, layer.bias, *shape, *IN_ONEDNN[layer.activation], ""
        )
    after = "relu" if layer.relu else None
    y = torch.ops.mkldnn._convolution_pointwise.binary(
        x_BCHW, onto_BCHW, weight, layer.bias, *shape, "add", 1.0, after, [], ""
    )
    return layer.activate_other(y)


def _by_cudnn(
    layer: FoldedLayer, weight: Tensor, x_BCHW: Tensor, onto_BCHW: Tensor | None
) -> Tensor:
    shape = (layer.stride, layer.padding, layer.dilation, 1)
    if onto_BCHW is None:
        return torch.cudnn_convolution_relu(x_BCHW, weight, layer.bias, *shape)
    return torch.cudnn_convolution_add_relu(x_BCHW, weight, onto_BCHW, 1.0, layer.bias, *shape)
