"""A network's graph as the engine runs it: norms folded, ReLU, sums and gates inside of layers.

What is left of the graph asks an executor for its layers, norms, gates and parameters.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from deepmoe.graph import Gating, functions
from deepmoe.graph.gating import compiled
from deepmoe.graph.graph import Layer
from deepmoe.graph.operations import NORMS, name_of
from deepmoe.graph.running import DROPOUTS, Site
from deepmoe.graph.shapes import Shapes
from deepmoe.sparse.cutting import Cutting
from deepmoe.sparse.folding import (
    ACTIVATIONS,
    Affine,
    FoldedLayer,
    FollowingParameter,
    fold,
    norm_as_affine,
)
from deepmoe.sparse.hoisting import all_hoisted, hoisted_gates, side_of
from deepmoe.sparse.node_settings import (
    attribute_of,
    batch_norm_of,
    padding_of,
    pair_or_text,
    pooling_of,
)
from deepmoe.sparse.program import Program

# What is nothing in evaluation.
LEFT_OUT = {*DROPOUTS, "droppath", "stochasticdepth", "detach", "identity"}


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
        self.hoisted = hoisted_gates(gating)

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
        users = [user for user in self.images.users if user in self.shapes]
        readers = [user for user in users if user.target is not functions.constant]
        first = next(iter(self.layers))
        cutting = Cutting(self.copied, self.run, self.images, self.shapes)
        before, after = cutting.parts(self._depends_on_gates)
        return Program(
            before=compiled(before),
            after=compiled(after),
            modules=self._other_modules(),
            layers=self.layers,
            norms=self.norms,
            parameters=self.parameters,
            sites=self.gating.sites,
            starts_with_convolution=[reader.args[1:2] for reader in readers] == [(first,)],
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
        if site is not None and not all_hoisted(self.gating, layer, self.hoisted):
            x = self._gated(node, number, site, x)
        module = self.module.get_submodule(layer.path)
        around: dict[str, Any] = {}
        if layer.is_conv:
            x, around = self._geometry(node, layer, module, x)
        norm = self._only_user(node, NORMS) if layer.is_conv else None
        batch_norm = None if norm is None else batch_norm_of(norm, self.module)
        if norm is not None and batch_norm is not None:
            self._replace(norm, node)
        self.layers[layer.path] = fold(
            module,
            batch_norm,
            self.dtype,
            activation=self._take_activation(node) if layer.is_conv else "",
            ins=None if layer.passes_on else side_of(self.gating, layer.ins),
            outs=side_of(self.gating, layer.outs),
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
            stride, padding, dilation = (pair_or_text(v) for v in node.args[3:6])
        sides = [padding_of(padding, i, weight.shape[2 + i], dilation[i]) for i in range(2)]
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
        value = attribute_of(self.module, name)
        assert isinstance(value, Tensor)
        dim = next(d for d in range(value.dim()) if value.shape[d] > 1)
        side = side_of(self.gating, units.flatten())
        self.parameters[name] = FollowingParameter(value.detach().to(self.dtype), dim, side)
        self._ask(node, "parameter", name)

    def _ask_for_norm(self, node: fx.Node) -> None:
        norm = batch_norm_of(node, self.module)
        if norm is None:
            return
        path = next(p for p, m in self.module.named_modules() if m is norm)
        units = self.gating.graph.followers[f"{path}.running_mean"]
        scale, shift = (t.to(self.dtype) for t in norm_as_affine(norm))
        activation = self._take_activation(node)
        self.norms[path] = Affine(scale, shift, activation, side_of(self.gating, units))
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
        settings = pooling_of(node, self.module)
        if settings is None:
            return
        size, stride, padding = settings
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if self._asks(x) and x.target == "convolve" and len(x.users) == 1 and not padding:
            self._ask(node, "convolve_and_pool", *x.args[1:], size, stride)
        else:
            self._ask(node, "max_pool", x, size, stride, padding)

    def _depends_on_gates(self, node: fx.Node) -> bool:
        if not self._asks(node):
            return False
        name = str(node.args[1])
        if node.target in ("convolve", "convolve_onto", "convolve_and_pool", "linear"):
            return self.layers[name].gated
        if node.target == "norm":
            return self.norms[name].channels is not None
        return node.target in ("gate", "parameter")
