"""A graph in two parts: what is the same whatever the gates are, and the rest."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True, eq=False)
class Cutting:
    """A graph that is to be cut.

    Attributes:
        graph: the whole of it.
        run: its input that is asked for layers.
        images: its other input.
        tensors: nodes that give a tensor; others give shapes, and what follows from them.
    """

    graph: fx.Graph
    run: fx.Node
    images: fx.Node
    tensors: Collection[fx.Node]

    def parts(self, depends_on_gates: Callable[[fx.Node], bool]) -> tuple[fx.Graph, fx.Graph]:
        """The graph cut where one tensor alone is handed on, as late as no gate comes before it."""
        nodes = [n for n in self.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
        gated = [i for i, node in enumerate(nodes) if depends_on_gates(node)]
        first = gated[0] if gated else len(nodes)
        crossing, rest = self.images, nodes
        for cut in range(first, 0, -1):
            found = self._handed_on(nodes[:cut], nodes[cut:])
            if found is not None:
                crossing, rest = found, nodes[cut:]
                break
        before = _graph_of(self, [n for n in nodes if n not in set(rest)], None, crossing)
        (output,) = self.graph.find_nodes(op="output")
        after = _graph_of(self, rest, crossing, output.args[0])
        return before, after

    def _handed_on(self, done: list[fx.Node], rest: list[fx.Node]) -> fx.Node | None:
        """The only tensor that goes from one part to the other, besides the images' shape."""
        later = set(rest)
        (output,) = self.graph.find_nodes(op="output")
        later.add(output)
        live = [n for n in done if any(user in later for user in n.users)]
        tensors = [n for n in live if n in self.tensors]
        if any(user in later and user in self.tensors for user in self.images.users):
            return None
        if len(tensors) != 1 or not all(n in self.tensors or self._is_shape(n) for n in live):
            return None
        return tensors[0]

    def _is_shape(self, node: fx.Node) -> bool:
        """Whether a number follows from the shape of the images alone."""
        return node not in self.tensors and all(
            source is self.images or self._is_shape(source) for source in node.all_input_nodes
        )


def _graph_of(
    whole: Cutting, nodes: Sequence[fx.Node], start: fx.Node | None, result: Any
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
