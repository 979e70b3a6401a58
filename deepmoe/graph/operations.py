"""What operations do to channels, by their names.

One table serves all front ends: `F.max_pool2d`, `nn.MaxPool2d`, `Tensor.max_pool2d` and
`aten.max_pool2d` have the same name here. What is in no set is not understood, and pins the
channels that reach it.
"""

from typing import Any

import torch
from torch import fx, nn

LAYERS = {"conv2d", "linear"}
NORMS = {"batchnorm", "batchnorm2d"}

# Every value by itself, whatever it is.
POINTWISE = {
    *("relu", "relu6", "silu", "gelu", "sigmoid", "hardsigmoid", "hardswish", "hardtanh", "tanh"),
    *("elu", "selu", "celu", "leakyrelu", "mish", "softplus", "clamp", "clampmin", "clampmax"),
    *("abs", "neg", "exp", "sqrt", "rsqrt", "square", "pow", "reciprocal"),
    *("dropout", "dropout2d", "alphadropout", "featuredropout", "featurealphadropout"),
    *("droppath", "stochasticdepth"),
    *("identity", "contiguous", "clone", "detach", "alias"),
    *("float", "half", "double", "bfloat16", "to", "type", "typeas", "tocopy"),
}
# Values lie in another order afterwards, or are of another kind.
COPYING = {
    *("contiguous", "clone", "float", "half", "double", "bfloat16"),
    *("to", "type", "typeas", "tocopy"),
}
# Two tensors value by value, or one and a number.
PAIRWISE = {"add", "iadd", "sub", "isub", "rsub", "mul", "imul", "div", "truediv", "maximum"}
ADDITIONS = {"add", "iadd"}

# Each channel by itself, over its positions.
SPATIAL = {
    *("maxpool2d", "avgpool2d", "adaptiveavgpool2d", "adaptivemaxpool2d", "lppool2d"),
    *("interpolate", "upsample", "upsamplebilinear2d", "upsamplenearest2d", "zeropad2d"),
}
PADDING = {"pad", "constantpadnd"}
REDUCING = {"mean", "sum", "amax", "amin"}

# Values are moved, and none is changed.
MOVING = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "movedim"),
    *("squeeze", "unsqueeze", "expand", "expandas", "cat", "concat", "concatenate", "stack"),
    *("split", "splitwithsizes", "chunk", "tensorsplit", "unbind", "getitem", "slice", "select"),
    *("narrow", "pad", "constantpadnd", "channelshuffle", "pixelshuffle", "roll", "flip"),
}

# Every channel depends on all of them.
MIXING = {"layernorm", "groupnorm", "softmax", "logsoftmax", "normalize", "cumsum", "matmul", "bmm"}

# What has nothing to do with values.
SHAPES = {"size", "symsize", "getattr", "dim", "numel", "floordiv", "ne", "eq", "lt", "gt", "le"}


def name_of(node: fx.Node, root: nn.Module) -> str:
    """The operation of a node: lower case, without underscores and overloads."""
    if node.op == "call_module":
        name = type(root.get_submodule(str(node.target))).__name__
    elif node.op == "call_method":
        name = str(node.target)
    else:
        target: Any = node.target
        name = str(getattr(target, "_opname", None) or getattr(target, "__name__", target))
    return name.split(".")[0].replace("_", "").lower()


def takes_dtype(node: fx.Node) -> bool:
    """Whether a call is told a kind of numbers, as a view that reads the same bits in another."""
    given = (*node.args, *node.kwargs.values())
    asked = [v.args[1] for v in given if isinstance(v, fx.Node) and v.target is getattr]
    return "dtype" in asked or any(isinstance(v, torch.dtype) for v in given)
