"""A network's graph as the engine runs it: norms folded, ReLU, sums and gates inside of layers.

What is left of the graph asks an executor for its layers, norms, gates and parameters: which
channels these have is its choice. All other operations are the network's own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from deepmoe.graph import Gating
from deepmoe.graph.channels import Shapes
from deepmoe.graph.gating import compiled
from deepmoe.graph.graph import Layer
from deepmoe.graph.operations import NORMS, name_of
from deepmoe.graph.running import DROPOUTS, Site
from deepmoe.sparse.folding import (
    ACTIVATIONS,
    Affine,
    FoldedLayer,
    FollowingParameter,
    Side,
    fold,
    norm_as_affine,
    pair,
)

# What a factor that is not negative may as well come before as after.
HOMOGENEOUS = {
    *("relu", "leakyrelu", "maxpool2d", "avgpool2d", "adaptiveavgpool2d", "adaptivemaxpool2d"),
    *("mean", "flatten", "view", "reshape", "squeeze", "cat", "identity", "contiguous", *DROPOUTS),
}

# What is nothing in evaluation.
LEFT_OUT = {*DROPOUTS, "droppath", "stochasticdepth", "detach", "identity"}


@dataclass(frozen=True)
class Program:
    """What the engine runs.

    Attributes:
        before: (modules, executor, images) -> what the layers before the first gate give.
        after: (modules, executor, that, a tensor with the shape of the images) -> logits.
        modules: of operations that are the network's own.
        layers: by path, in order.
        norms: by path, those that stand alone.
        parameters: by name, those with a value for each channel.
        sites: for numbers that `gate` is called with, which gates multiply what.
        starts_with_convolution: whether images are read by the first layer alone.
    """

    before: Callable[..., Tensor]
    after: Callable[..., Tensor]
    modules: nn.Module
    layers: dict[str, FoldedLayer]
    norms: dict[str, Affine]
    parameters: dict[str, FollowingParameter]
    sites: tuple[Site | None, ...]
    starts_with_convolution: bool
    colours: int

    def start(self, run: Any, x_BCHW: Tensor) -> Tensor:
        """The first layers, as far as they are the same whatever the gates are."""
        return self.before(self.modules, run, x_BCHW)

    def go_on(self, run: Any, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Logits, from what the first layers gave for images of this size."""
        images = features.new_empty(()).expand(len(features), self.colours, *size)
        return self.after(self.modules, run, features, images)

    def whole(self, run: Any, x_BCHW: Tensor) -> Tensor:
        """Logits of images."""
        size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
        return self.go_on(run, self.start(run, x_BCHW), size)


def translate(module: nn.Module, gating: Gating, dtype: torch.dtype) -> Program:
    """Brings a network in evaluation mode into the engine's form.

    Args:
        module: the network, which is used up: it keeps only what the program still calls.
        gating: of it.
        dtype: to run in.
    """
    return _Translation(module, gating, dtype).program()


class _Translation:
    """The graph while it is rewritten, step by step."""

    def __init__(self, module: nn.Module, gating: Gating, dtype: torch.dtype) -> None:
        self.module, self.gating, self.dtype = module, gating, dtype
        graph = gating.graph
        self.copied = fx.Graph()
        self.run = self.copied.placeholder("run")
        values: dict[fx.Node, fx.Node] = {}
        self.copied.output(self.copied.graph_copy(graph.program, values))
        shapes = Shapes(graph.skeleton, graph.program)
        shapes.run(torch.empty(2, graph.colours, *graph.tried_size, device="meta"))
        self.shapes: dict[fx.Node, torch.Size] = {
            values[node]: value.shape
            for node, value in shapes.env.items()
            if isinstance(value, Tensor) and node in values
        }
        self.images = next(
            n for n in self.copied.nodes if n.op == "placeholder" and n is not self.run
        )
        self.layers: dict[str, FoldedLayer] = {}
        self.norms: dict[str, Affine] = {}
        self.parameters: dict[str, FollowingParameter] = {}
        self.hoisted = _hoisted(gating)

    def program(self) -> Program:
        layers = {layer.node: number for number, layer in enumerate(self.gating.graph.layers)}
        for node in list(self.copied.nodes):
            if self._name(node) in LEFT_OUT:  # of evaluation: nothing
                assert isinstance(node.args[0], fx.Node)
                self._replace(node, node.args[0])
        for node in list(self.copied.nodes):
            if node.name in layers:
                self._fold_layer(node, layers[node.name])
            elif node.op == "get_attr":
                self._ask_for_parameter(node)
        for node in list(self.copied.nodes):
            name = self._name(node)
            if name in NORMS:
                self._ask_for_norm(node)
            elif name == "add":
                self._add_onto(node)
        for node in list(self.copied.nodes):
            if self._name(node) == "maxpool2d":
                self._pool(node)
        self.copied.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        readers = [user for user in self.images.users if user in self.shapes]
        first = next(iter(self.layers))
        before, after = self._parts()
        return Program(
            before=compiled(before),
            after=compiled(after),
            modules=self._other_modules(),
            layers=self.layers,
            norms=self.norms,
            parameters=self.parameters,
            sites=self.gating.sites,
            starts_with_convolution=[r.args[1] for r in readers] == [first],
            colours=self.gating.graph.colours,
        )

    def _other_modules(self) -> nn.Module:
        """The network without the weights that were folded: they would be there twice."""
        for path in (*self.layers, *self.norms):
            for parameter in self.module.get_submodule(path).parameters(recurse=False):
                parameter.data = parameter.data.new_empty(0)
        return self.module.to(self.dtype)

    # Rewriting.

    def _asks(self, node: fx.Node) -> bool:
        """Whether a node asks the executor for something."""
        return node.op == "call_method" and node.args[0] is self.run

    def _name(self, node: fx.Node) -> str:
        if self._asks(node):
            return str(node.target)
        if not node.op.startswith("call"):
            return ""
        return name_of(node, self.module)

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        if node in self.shapes:
            self.shapes[new] = self.shapes[node]
        node.replace_all_uses_with(new)
        self.copied.erase_node(node)

    def _ask(self, node: fx.Node, method: str, *arguments: Any) -> fx.Node:
        """Lets the executor do what a node did."""
        with self.copied.inserting_before(node):
            new = self.copied.call_method(method, (self.run, *arguments))
        self._replace(node, new)
        return new

    def _only_user(self, node: fx.Node, names: Iterable[str]) -> fx.Node | None:
        """The node that alone reads this one, if it is called so."""
        users = list(node.users)
        return users[0] if len(users) == 1 and self._name(users[0]) in names else None

    def _take_activation(self, node: fx.Node) -> str:
        """Leaves an activation that alone reads a node to the node itself; its name."""
        user = self._only_user(node, (*ACTIVATIONS, "hardtanh"))
        if user is None:
            return ""
        name = self._name(user)
        if name == "hardtanh":  # as torch.export writes relu6
            name = "relu6" if user.args[1:] in ((0, 6), (0.0, 6.0)) else ""
        if name:
            self._replace(user, node)
        return name

    def _fold_layer(self, node: fx.Node, number: int) -> None:
        layer, x = self.gating.graph.layers[number], node.args[0]
        assert isinstance(x, fx.Node)
        scale = self.hoisted.get(layer.path)
        site = self.gating.sites[number]
        if site is not None and not _all_hoisted(self.gating, layer, self.hoisted):
            x = self._gated(node, number, site, x)
        module = self.module.get_submodule(layer.path)
        around: dict[str, Any] = {}
        if layer.is_conv:
            x, around = self._geometry(node, layer, module, x)
        norm = self._only_user(node, NORMS) if layer.is_conv else None
        batch_norm = None if norm is None else _batch_norm(norm, self.module)
        if norm is not None and batch_norm is not None:
            self._replace(norm, node)
        self.layers[layer.path] = fold(
            module,
            batch_norm,
            self.dtype,
            activation=self._take_activation(node) if layer.is_conv else "",
            ins=None if layer.passes_on else _side(self.gating, layer.ins),
            outs=_side(self.gating, layer.outs),
            scale=scale,
            **around,
        )
        self._ask(node, "convolve" if layer.is_conv else "linear", layer.path, x)

    def _gated(self, node: fx.Node, number: int, site: Site, x: fx.Node) -> fx.Node:
        for user in x.users:
            other: Any = user.args[1] if self._name(user) == "gate" else None
            if other is not None and self.gating.sites[other] == site:
                return user
        with self.copied.inserting_before(node):
            new = self.copied.call_method("gate", (self.run, number, x))
        self.shapes[new] = self.shapes[x]
        return new

    def _geometry(
        self, node: fx.Node, layer: Layer, module: nn.Module, x: fx.Node
    ) -> tuple[fx.Node, dict[str, Any]]:
        """Where a kernel goes; padding that a folded layer does not have becomes a node."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        mode = "constant"
        if node.op == "call_module":
            assert isinstance(module, nn.Conv2d)
            stride, padding, dilation = module.stride, module.padding, module.dilation
            if module.padding_mode != "zeros":
                mode = module.padding_mode
        else:
            stride, padding, dilation = (_pair_or_text(v) for v in node.args[3:6])
        sides = [_padding(padding, i, weight.shape[2 + i], dilation[i]) for i in range(2)]
        if mode != "constant" or any(low != high for low, high in sides):
            amounts = (*sides[1], *sides[0])
            with self.copied.inserting_before(node):
                x = self.copied.call_function(F.pad, (x, amounts), {"mode": mode})
            self.shapes[x] = self.shapes[node]
            sides = [(0, 0), (0, 0)]
        return x, {
            "stride": tuple(stride),
            "padding": tuple(low for low, _ in sides),
            "dilation": tuple(dilation),
            "groups": len(layer.ins) // weight.shape[1],
        }

    def _ask_for_parameter(self, node: fx.Node) -> None:
        name = str(node.target)
        units = self.gating.graph.followers.get(name)
        if units is None or not bool((self.gating.gate_of_unit[units] >= 0).any()):
            return
        value = _attribute(self.module, name)
        assert isinstance(value, Tensor)
        dim = next(d for d in range(value.dim()) if value.shape[d] > 1)
        side = _side(self.gating, units.flatten())
        self.parameters[name] = FollowingParameter(value.detach().to(self.dtype), dim, side)
        self._ask(node, "parameter", name)

    def _ask_for_norm(self, node: fx.Node) -> None:
        norm = _batch_norm(node, self.module)
        if norm is None:
            return
        path = next(p for p, m in self.module.named_modules() if m is norm)
        units = self.gating.graph.followers[f"{path}.running_mean"]
        scale, shift = (t.to(self.dtype) for t in norm_as_affine(norm))
        activation = self._take_activation(node)
        self.norms[path] = Affine(scale, shift, activation, _side(self.gating, units))
        self._ask(node, "norm", path, node.args[0])

    def _add_onto(self, node: fx.Node) -> None:
        """A convolution whose result is added to something adds it itself."""
        if len(node.args) != 2 or node.kwargs:
            return
        sides = [a for a in node.args if isinstance(a, fx.Node)]
        if len(sides) != 2 or len({self.shapes.get(side) for side in sides}) != 1:
            return
        order = {n: i for i, n in enumerate(self.copied.nodes)}
        convs = [s for s in sides if self._adds_up(s)]
        if not convs:
            return
        last = max(convs, key=lambda n: order[n])
        stream = sides[1] if last is sides[0] else sides[0]
        path, x = last.args[1], last.args[2]
        assert isinstance(path, str)
        if stream in convs:
            self._move_bias(str(stream.args[1]), path)
        activation = self._take_activation(node)
        self.layers[path] = replace(self.layers[path], activation=activation)
        self._ask(node, "convolve_onto", path, x, stream)

    def _adds_up(self, node: fx.Node) -> bool:
        if node.target != "convolve" or len(node.users) != 1:
            return False
        layer = self.layers[str(node.args[1])]
        return not layer.activation and layer.scale is None

    def _move_bias(self, stream: str, onto: str) -> None:
        """Saves a pass over what is added to."""
        bias, other = self.layers[stream].bias, self.layers[onto].bias
        if bias is not None and other is not None:
            self.layers[stream] = replace(self.layers[stream], bias=None)
            self.layers[onto] = replace(self.layers[onto], bias=bias + other)

    def _pool(self, node: fx.Node) -> None:
        """Max pooling over squares, by the convolution before it if that can be."""
        settings = _pooling(node, self.module)
        if settings is None:
            return
        size, stride, padding = settings
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if self._asks(x) and x.target == "convolve" and len(x.users) == 1 and not padding:
            self._ask(node, "convolve_and_pool", *x.args[1:], size, stride)
        else:
            self._ask(node, "max_pool", x, size, stride, padding)

    # The two parts.

    def _parts(self) -> tuple[fx.Graph, fx.Graph]:
        """The graph cut where one tensor alone is handed on, as late as no gate comes before it."""
        nodes = [n for n in self.copied.nodes if n.op not in ("placeholder", "output", "get_attr")]
        gated = [i for i, node in enumerate(nodes) if self._depends_on_gates(node)]
        first = gated[0] if gated else len(nodes)
        crossing, rest = self.images, nodes
        for cut in range(first, 0, -1):
            found = self._handed_on(nodes[:cut], nodes[cut:])
            if found is not None:
                crossing, rest = found, nodes[cut:]
                break
        before = _graph_of(self, [n for n in nodes if n not in set(rest)], None, crossing)
        (output,) = self.copied.find_nodes(op="output")
        after = _graph_of(self, rest, crossing, output.args[0])
        return before, after

    def _depends_on_gates(self, node: fx.Node) -> bool:
        if not self._asks(node):
            return False
        name = str(node.args[1])
        if node.target in ("convolve", "convolve_onto", "convolve_and_pool", "linear"):
            return self.layers[name].gated
        if node.target == "norm":
            return self.norms[name].channels is not None
        return node.target in ("gate", "parameter")

    def _handed_on(self, done: list[fx.Node], rest: list[fx.Node]) -> fx.Node | None:
        """The only tensor that goes from one part to the other, besides the images' shape."""
        later = set(rest)
        (output,) = self.copied.find_nodes(op="output")
        later.add(output)
        live = [n for n in done if any(user in later for user in n.users)]
        tensors = [n for n in live if n in self.shapes]
        if any(user in later and user in self.shapes for user in self.images.users):
            return None
        if len(tensors) != 1 or not all(n in self.shapes or self._is_shape(n) for n in live):
            return None
        return tensors[0]

    def _is_shape(self, node: fx.Node) -> bool:
        """Whether a number follows from the shape of the images alone."""
        return node not in self.shapes and all(
            source is self.images or self._is_shape(source) for source in node.all_input_nodes
        )


def _graph_of(
    whole: _Translation, nodes: Sequence[fx.Node], start: fx.Node | None, result: Any
) -> fx.Graph:
    """Some of the nodes as a graph of their own, from images or from what others made of them."""
    part = fx.Graph()
    made: dict[fx.Node, fx.Node] = {whole.run: part.placeholder("run")}
    if start is not None:
        features = part.placeholder("features")
        made[whole.images] = part.placeholder("images")
        made[start] = features
    else:
        made[whole.images] = part.placeholder("images")

    def of(node: fx.Node) -> fx.Node:
        if node not in made:  # an attribute, or a number that follows from a shape
            for source in node.all_input_nodes:
                of(source)
            made[node] = part.node_copy(node, of)
        return made[node]

    for node in nodes:
        made[node] = part.node_copy(node, of)
    part.output(fx.node.map_arg(result, of))
    part.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return part


def _hoisted(gating: Gating) -> dict[str, int]:
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
        layer.path: _side(gating, layer.outs)
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


def _all_hoisted(gating: Gating, layer: Layer, hoisted: dict[str, int]) -> bool:
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


def _side(gating: Gating, units: Tensor) -> Side:
    gates = gating.gate_of_unit[units]
    if not bool((gates >= 0).any()):
        return None
    start = 0
    for number, width in enumerate(gating.widths):
        if len(gates) == width and torch.equal(gates, torch.arange(start, start + width)):
            return number
        start += width
    return gates


def _batch_norm(node: fx.Node, root: nn.Module) -> nn.BatchNorm2d | None:
    """The norm that a node runs, if it can be folded."""
    path: Any = node.target
    if node.op != "call_module":
        module_node = node.args[1] if len(node.args) > 1 else None
        path = module_node.target if isinstance(module_node, fx.Node) else None
    norm = None if path is None else _attribute(root, str(path))
    is_norm = isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
    return norm if is_norm else None


def _pooling(node: fx.Node, root: nn.Module) -> tuple[int, int, int] | None:
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


def _pair_or_text(value: Any) -> Any:
    """Settings of a convolution for both sides."""
    return value if isinstance(value, str) else pair(value)


def _padding(padding: Any, side: int, kernel: int, dilation: int) -> tuple[int, int]:
    """How much to add before and after."""
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = dilation * (kernel - 1)
        return total // 2, total - total // 2
    return padding[side], padding[side]


def _attribute(root: nn.Module, name: str) -> Any:
    found: Any = root
    for part in name.split("."):
        found = getattr(found, part)
    return found
