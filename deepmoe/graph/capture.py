"""A network as a graph of operations, captured from its own forward.

`torch.fx` traces most networks in milliseconds. Where their Python code asks for values, as in
networks of Hugging Face, `torch.export` follows it with real shapes, in seconds. Either way the
graph calls the network's own modules: weights, training mode and statistics stay those of the user.
"""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from deepmoe.errors import UserError, reason
from deepmoe.graph import functions
from deepmoe.graph.normal_form import MOST_CONSTANTS, SWITCHES, normalised
from deepmoe.graph.shapes import Shapes

MOST_PIXELS = 1e6  # a side: sizes without a bound have a larger one
STOCHASTIC_DEPTH = ("DropPath", "StochasticDepth")  # of timm, of torchvision


def capture(module: nn.Module, images: Tensor) -> fx.Graph:
    """The operations of a network, from one input of images to one output.

    Args:
        module: the network; its mode is left as it is.
        images: such as it takes. Sizes other than theirs are possible where its code allows it.

    Raises:
        UserError: where it can't be captured, or gives more than one tensor.
    """
    with evaluation_mode(module):
        if images.is_meta:  # there are no values to compare
            graph = _by_fx(module, images, None)
            if graph is not None:
                return graph
        expected = one_tensor(_call(module, images))
        _check_logits(expected, images)
        graph = _by_fx(module, images, expected)
        return _by_export(module, images, expected) if graph is None else graph


def _check_logits(found: Tensor, images: Tensor) -> None:
    if found.dim() < 2 or len(found) != len(images):
        raise UserError(
            f"the network gives a tensor of shape {tuple(found.shape)} for {len(images)} "
            "images, not logits for each of them"
        )


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode again afterwards."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode


def one_tensor(output: Any) -> Tensor:
    """The only tensor of a network's output, such as the logits of Hugging Face's.

    Raises:
        UserError: where there is another number of them.
    """
    values = output.values() if isinstance(output, dict) else output
    if isinstance(output, Tensor):
        return output
    tensors = [v for v in values if isinstance(v, Tensor)] if isinstance(values, Iterable) else []
    if len(tensors) != 1 or len(tensors) != sum(v is not None for v in values):
        raise UserError(
            f"the network gives {len(tensors)} tensors in a {type(output).__name__}: "
            "wrap it in a module whose forward returns its logits alone"
        )
    return tensors[0]


def _call(module: nn.Module, images: Tensor) -> Any:
    try:
        with torch.no_grad():
            return module(images)
    except UserError:
        raise
    except Exception as error:  # of anybody's code
        raise UserError(
            f"the network does not take images of shape {tuple(images.shape)}: {reason(error, 200)}"
        ) from error


class _Tracer(fx.Tracer):
    """Stops at PyTorch's own modules; follows subclasses of theirs, whose forwards may do more."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m).__name__ in STOCHASTIC_DEPTH:  # which asks for its mode
            return True
        return type(m).__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)


def _by_fx(module: nn.Module, images: Tensor, expected: Tensor | None) -> fx.Graph | None:
    """By tracing with stand-ins; `None` where that fails, or would compute something else.

    Args:
        module: the network.
        images: that it is tried with.
        expected: what it gives for them, if they have values.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            graph = normalised(_copied(_traced(module)), module)
        with torch.no_grad():
            if expected is None:
                _check_logits(one_tensor(Shapes(module, graph).run(images)), images)
                return graph
            found = one_tensor(fx.GraphModule(module, graph)(images))
        return graph if expected.is_meta or torch.equal(found, expected) else None
    except _ContextSwitched as error:
        raise UserError(SWITCHES) from error
    except Exception:  # of anybody's code, under stand-ins
        return None


def _traced(module: nn.Module) -> fx.Graph:
    """What the tracer finds; tensors that the code holds become constants of the graph."""
    with _refusing_contexts():
        graph = _Tracer().trace(module)
    images = next(iter(graph.find_nodes(op="placeholder")))
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name.startswith("_tensor_constant"):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_constant(graph, images, getattr(module, name)))
            graph.erase_node(node)
            delattr(module, name)  # where the tracer has left it
    return graph


def _by_export(module: nn.Module, images: Tensor, expected: Tensor) -> fx.Graph:
    """By following the code with real shapes; batch and image size are left free."""
    free = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    twice = torch.cat([images, images])  # one image would be taken for a constant
    try:
        silent = contextlib.redirect_stderr(io.StringIO())  # it shows code that it can't follow
        with warnings.catch_warnings(action="ignore"), _quiet(), silent, torch.no_grad():
            exported = torch.export.export(module, (twice,), dynamic_shapes=(free,), strict=False)
    except Exception as error:  # of anybody's code
        raise UserError(
            f"the network {type(module).__name__} can't be captured ({reason(error, 200)}): "
            "its forward should take one batch of images, and branch on nothing but shapes"
        ) from error
    _tell_of_stochastic_depth(module)
    bounds = _bounds(exported)
    with warnings.catch_warnings(action="ignore"):  # the graph belongs to no module yet
        graph = normalised(_with_attributes(exported), module)
        if not expected.is_meta:
            with torch.no_grad():
                found = one_tensor(fx.GraphModule(module, graph)(images))
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
                raise UserError(
                    f"the network {type(module).__name__} can't be captured: what is captured "
                    "gives other outputs; its forward may change parts of a tensor in place"
                )
    next(iter(graph.find_nodes(op="placeholder"))).meta["bounds"] = bounds
    return graph


def _bounds(exported: Any) -> tuple[tuple[int, float], ...]:
    """From which height and width, and up to which, an exported graph holds."""
    name = exported.graph_signature.user_inputs[0]
    (images,) = [n for n in exported.graph.find_nodes(op="placeholder") if n.name == name]
    found = []
    for side in images.meta["val"].shape[2:]:
        expression = side.node.expr if isinstance(side, torch.SymInt) else None
        known = exported.range_constraints.get(expression)
        if known is None:
            found.append((int(side), int(side)) if expression is None else (1, math.inf))
        else:
            upper = float(known.upper)
            found.append((int(known.lower), upper if upper < MOST_PIXELS else math.inf))
    return tuple(found)


@contextlib.contextmanager
def _refusing_contexts() -> Iterator[None]:
    """A tracer would not see that gradients or precisions are switched on the way."""

    def refuse(*_: Any) -> Any:
        raise _ContextSwitched

    kinds: tuple[Any, ...] = (
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        torch.autocast,
    )
    before = [kind.__enter__ for kind in kinds]
    for kind in kinds:
        setattr(kind, "__enter__", refuse)  # noqa: B010
    try:
        yield
    finally:
        for kind, enter in zip(kinds, before, strict=True):
            setattr(kind, "__enter__", enter)  # noqa: B010


class _ContextSwitched(Exception):
    """The forward of a network switches gradients or precision."""


def _tell_of_stochastic_depth(module: nn.Module) -> None:
    """Says what an exported network has lost: blocks that are left out at random in training."""
    for path, part in module.named_modules():
        rate = getattr(part, "drop_prob", None) or getattr(part, "p", None)
        if type(part).__name__.endswith(STOCHASTIC_DEPTH) and rate:
            warnings.warn(
                f"stochastic depth ({path} and others) is not applied in training: "
                "its code asks for a mode that is fixed when the network is captured",
                stacklevel=2,
            )
            return


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export tells of what it tries and can't, though it finds another way."""
    loggers = [logging.getLogger(name) for name in ("torch.fx", "torch.export", "torch._dynamo")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _with_attributes(exported: Any) -> fx.Graph:
    """The exported graph with parameters as attributes of the module, and without its checks."""
    graph, signature = exported.graph, exported.graph_signature
    attributes = {
        spec.arg.name: spec.target
        for spec in signature.input_specs
        if spec.target is not None and hasattr(spec.arg, "name")
    }
    constants = exported.constants
    (images,) = (n for n in graph.find_nodes(op="placeholder") if n.name not in attributes)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in attributes:
            with graph.inserting_after(images):
                target = attributes[node.name]
                if target in constants and target not in exported.state_dict:
                    kept = _constant(graph, images, constants[target])
                else:
                    kept = graph.get_attr(target)
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
        elif node.target is torch.ops.aten.lift_fresh_copy.default:  # of a constant
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_module" or _is_check(node):
            graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    results = [n for n in output.args[0] if isinstance(n, fx.Node)]
    output.args = (results[0],)
    return _copied(graph)


def _copied(graph: fx.Graph) -> fx.Graph:
    """A graph that belongs to no module yet."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def _is_check(node: fx.Node) -> bool:
    return any(word in str(node.target) for word in ("_assert", "sym_constrain", "_guards"))


def _constant(graph: fx.Graph, images: fx.Node, value: Tensor) -> fx.Node:
    if not isinstance(value, Tensor) or value.numel() > MOST_CONSTANTS:
        raise UserError("the network's code holds a tensor of its own: make it a buffer")
    values, shape = value.flatten().tolist(), tuple(value.shape)
    return graph.call_function(functions.constant, (images, values, shape, value.dtype))
