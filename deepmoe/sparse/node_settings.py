"""What the operations of a graph are set to, whether modules or functions do them."""

from typing import Any

from torch import fx, nn

from deepmoe.sparse.folding import pair


def batch_norm_of(node: fx.Node, root: nn.Module) -> nn.BatchNorm2d | None:
    """The norm that a node runs, if it can be folded."""
    path: Any = node.target
    if node.op != "call_module":
        module_node = node.args[1] if len(node.args) > 1 else None
        path = module_node.target if isinstance(module_node, fx.Node) else None
    norm = None if path is None else attribute_of(root, str(path))
    is_norm = isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
    return norm if is_norm else None


def pooling_of(node: fx.Node, root: nn.Module) -> tuple[int, int, int] | None:
    """Size, stride and padding of max pooling over squares; `None` for any other."""
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        given = {name: getattr(module, name) for name in names}
    else:
        given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    if given.get("ceil_mode") or given.get("return_indices"):
        return None
    size = given["kernel_size"]
    values = (size, given.get("stride") or size, given.get("padding", 0), given.get("dilation", 1))
    pairs = [pair(v) for v in values]
    if any(a != b for a, b in pairs) or pairs[3][0] != 1:
        return None
    return pairs[0][0], pairs[1][0], pairs[2][0]


def pair_or_text(value: Any) -> Any:
    """Settings of a convolution for both sides."""
    return value if isinstance(value, str) else pair(value)


def padding_of(padding: Any, side: int, kernel: int, dilation: int) -> tuple[int, int]:
    """How much to add before and after."""
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = dilation * (kernel - 1)
        return total // 2, total - total // 2
    return padding[side], padding[side]


def attribute_of(root: nn.Module, name: str) -> Any:
    """A parameter, buffer or module by its dotted name."""
    found: Any = root
    for part in name.split("."):
        found = getattr(found, part)
    return found
