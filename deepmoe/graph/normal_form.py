"""A captured graph in one form, which runs in any memory format.

Layers and norms are modules, and nothing is changed in place.
"""

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from deepmoe.errors import UserError
from deepmoe.graph import functions
from deepmoe.graph.operations import name_of, takes_dtype

# Modules that may work in place, the functions that never do, and the settings these take.
ACTIVATIONS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.ReLU: (F.relu,),
    nn.ReLU6: (F.relu6,),
    nn.SiLU: (F.silu,),
    nn.Hardswish: (F.hardswish,),
    nn.Hardsigmoid: (F.hardsigmoid,),
    nn.Mish: (F.mish,),
    nn.ELU: (F.elu, "alpha"),
    nn.LeakyReLU: (F.leaky_relu, "negative_slope"),
    nn.Hardtanh: (F.hardtanh, "min_val", "max_val"),
}
# Views that not every memory format allows, and what does the same in all of them.
COPIED_VIEWS: dict[Any, Any] = {
    "view": "reshape",
    "view_as": "reshape_as",
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.view_as.default: torch.ops.aten.reshape_as.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
CONSTANTS = {"tensor", "astensor", "newtensor"}
MOST_CONSTANTS = 64  # numbers that the code of a network may hold in a tensor
SWITCHES = (
    "the network's forward switches gradients or autocast on its way, which can't be captured: "
    "freeze parameters by requires_grad_(False), and use autocast around the model"
)


def normalised(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """The same graph, in which layers and norms are modules, and nothing is changed in place.

    Its views may copy: a network that is trained with channels last would not allow them.
    """
    for node in list(graph.nodes):
        if node.op == "placeholder":
            node.target = "images"  # whatever the network calls them
        elif node.op.startswith("call") and not node.args and node.kwargs:
            node.args, node.kwargs = tuple(node.kwargs.values())[:1], _without_first(node.kwargs)
        name = name_of(node, root) if node.op.startswith("call") else ""
        if "wrapwith" in name:
            raise UserError(SWITCHES)
        if name == "conv2d" and node.op == "call_function":
            _make_convolution(graph, node, root)
        elif name == "linear" and node.op == "call_function":
            _make_module(graph, node, root, nn.Linear, node.args[0], node.args[1])
        elif name == "batchnorm" and node.op == "call_function":
            _make_norm(graph, node, root)
        elif name == "prelu" and node.op == "call_module":
            with graph.inserting_before(node):
                slopes = graph.get_attr(f"{node.target}.weight")
                _replace(graph, node, graph.call_function(F.prelu, (node.args[0], slopes)))
        elif name in CONSTANTS and not _reads_numbers(node):
            _make_constant(graph, node)
        elif node.op.startswith("call"):
            _make_functional(graph, node, root)
    for node in graph.nodes:
        called = node.op in ("call_function", "call_method") and node.target in COPIED_VIEWS
        if called and not takes_dtype(node):
            node.target = COPIED_VIEWS[node.target]
            node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph.lint()
    return graph


def _without_first(values: dict[str, Any]) -> dict[str, Any]:
    return dict(list(values.items())[1:])


def _arguments(node: fx.Node, function: Any) -> dict[str, Any]:
    """Arguments of a call by name, as of PyTorch's function of the same kind."""
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _owner(
    weight: Any, root: nn.Module, kind: type[nn.Module], exact: bool, attribute: str = "weight"
) -> str | None:
    """The path of the module that a weight belongs to, if it is of this kind."""
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None
    path, _, name = str(weight.target).rpartition(".")
    if name != attribute or not path:
        return None
    module = root.get_submodule(path)
    return path if (type(module) is kind if exact else isinstance(module, kind)) else None


def _replace(graph: fx.Graph, node: fx.Node, new: fx.Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _make_module(
    graph: fx.Graph, node: fx.Node, root: nn.Module, kind: type[nn.Module], x: Any, weight: Any
) -> bool:
    """Lets the module itself stand for a call with its weight, if its forward is that call."""
    path = _owner(weight, root, kind, exact=True)
    if path is None:
        return False
    with graph.inserting_before(node):
        _replace(graph, node, graph.call_module(path, (x,)))
    return True


def _make_convolution(graph: fx.Graph, node: fx.Node, root: nn.Module) -> None:
    def signature(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1): ...

    given = _arguments(node, signature)
    path = _owner(given["weight"], root, nn.Conv2d, exact=True)
    if path is not None:
        conv = root.get_submodule(path)
        own = (conv.stride, conv.padding, conv.dilation)
        asked = tuple(_pair(given[key]) for key in ("stride", "padding", "dilation"))
        if own == asked and conv.padding_mode == "zeros":
            _make_module(graph, node, root, nn.Conv2d, given["input"], given["weight"])
            return
    keys = ("input", "weight", "bias", "stride", "padding", "dilation")
    with graph.inserting_before(node):
        new = graph.call_function(functions.conv2d, tuple(given[key] for key in keys))
        _replace(graph, node, new)


def _make_norm(graph: fx.Graph, node: fx.Node, root: nn.Module) -> None:
    if node.target is F.batch_norm:
        given = _arguments(node, F.batch_norm)
        x, mean = given["input"], given["running_mean"]
    else:
        x, mean = node.args[0], node.args[3]
    path = _owner(
        mean, root, nn.modules.batchnorm._BatchNorm, exact=False, attribute="running_mean"
    )
    if path is None:
        raise UserError(
            "the network calls batch norm with tensors of its own, which would not follow its "
            "mode: use nn.BatchNorm2d"
        )
    if type(root.get_submodule(path)) in (nn.BatchNorm1d, nn.BatchNorm2d):
        with graph.inserting_before(node):
            _replace(graph, node, graph.call_module(path, (x,)))
    else:
        with graph.inserting_before(node):
            module = graph.get_attr(path)
            _replace(graph, node, graph.call_function(functions.batch_norm, (x, module)))


def _make_functional(graph: fx.Graph, node: fx.Node, root: nn.Module) -> None:
    """Replaces an operation that changes its input by one that does not.

    Whoever reads the input after it reads the result instead.
    """
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if not getattr(module, "inplace", False) or type(module) not in ACTIVATIONS:
            return
        function, *names = ACTIVATIONS[type(module)]
        with graph.inserting_before(node):
            options = {name: getattr(module, name) for name in names}
            new = graph.call_function(function, node.args, options)
        source = node.args[0]
        _replace(graph, node, new)
        node = new
    else:
        target = _functional_target(node)
        if target is None:
            return
        node.target, source = target, node.args[0]
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    if isinstance(source, fx.Node):
        for user in _users_after(node, source):
            user.replace_input_with(source, node)


def _make_constant(graph: fx.Graph, node: fx.Node) -> None:
    """Makes a tensor of plain numbers where the images are, instead of bringing it there."""
    like: Any = next(iter(graph.find_nodes(op="placeholder")))
    data: Any = node.args[0]
    dtype: Any = node.kwargs.get("dtype")
    if node.op == "call_method":  # of a tensor, whose kind of numbers it has unless told
        like, data = node.args[:2]
    known = isinstance(dtype, torch.dtype) or (node.op == "call_function" and dtype is None)
    try:
        numbers = torch.tensor(data, dtype=dtype if known else None)
        if not known and numbers.is_floating_point():
            numbers = torch.tensor(data, dtype=torch.double)
    except Exception:  # of what is no number
        return
    # Numbers of a kind that a pass will tell are rounded there: all kinds have to agree on them.
    small = known or bool((numbers.to(torch.complex128).abs() < 2.0**53).all())
    if numbers.numel() > MOST_CONSTANTS or not small:
        return
    values, shape = numbers.flatten().tolist(), tuple(numbers.shape)
    with graph.inserting_before(node):
        kind = numbers.dtype if known else dtype
        new = graph.call_function(functions.constant, (like, values, shape, kind))
        _replace(graph, node, new)


def _reads_numbers(node: fx.Node) -> bool:
    """Whether a tensor is made of what is known in a pass alone, or is to be learned."""
    start = 1 if node.op == "call_method" else 0
    found: list[fx.Node] = []
    fx.node.map_arg(node.args[start:], found.append)
    return bool(found) or bool(node.kwargs.get("requires_grad")) or len(node.args) != start + 1


def _functional_target(node: fx.Node) -> Any:
    if node.op == "call_method":
        name = str(node.target)
        return name.rstrip("_") if name.endswith("_") and not name.endswith("__") else None
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        packet = target._opname
        if packet.endswith("_") and not packet.endswith("__"):
            return getattr(getattr(torch.ops.aten, packet[:-1]), target._overloadname)
        return None
    name = getattr(target, "__name__", "")
    if name in ("iadd", "isub", "imul", "itruediv"):
        return getattr(operator, name[1:])
    plain = getattr(target, "__module__", "") == operator.and_.__module__  # whose names end so, too
    if name.endswith("_") and not name.endswith("__") and not plain:
        return getattr(F, name[:-1], None) or getattr(torch, name[:-1])
    return target if node.kwargs.get("inplace") else None


def _users_after(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    after, at = set(), node.next
    while at.op != "root":
        after.add(at)
        at = at.next
    return [user for user in source.users if user in after]


def _pair(value: Any) -> Any:
    if isinstance(value, int):
        return (value, value)
    return tuple(value) if isinstance(value, list | tuple) else value
