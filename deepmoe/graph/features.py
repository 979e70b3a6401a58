"""A network without its classifier: what it makes of images before it names a class."""

from dataclasses import replace

import torch
from torch import fx

from deepmoe.errors import UserError
from deepmoe.graph.graph import Graph
from deepmoe.graph.shapes import Shapes, blank


def without_classifier(graph: Graph) -> Graph:
    """The description of a network as far as what its last layer reads: its features.

    They take the place of the logits: `classes` is how many there are.

    Raises:
        UserError: where the last layer is no classifier that reads one vector an image.
    """
    last = graph.layers[-1]
    read = next(node for node in graph.program.nodes if node.name == last.node).args[0]
    shapes = Shapes(graph.skeleton, graph.program)
    with torch._C.DisableTorchFunction():  # as `build` does: where others make networks of none
        shapes.run(blank(graph.colours, graph.tried_size))
    shape = shapes.env[read].shape if isinstance(read, fx.Node) else torch.Size()
    if last.is_conv or len(shape) != 2 or len(last.outs) != graph.classes:
        raise UserError(
            f"the network has no features to cluster images by: its last layer, {last.path}, is "
            "not a linear classifier of one vector per image"
        )
    assert isinstance(read, fx.Node)
    program, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    program.graph_copy(graph.program, copies)
    program.output(copies[read])
    program.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return replace(
        graph,
        program=program,
        layers=graph.layers[:-1],
        groups=tuple(
            replace(g, readers=tuple(path for path in g.readers if path != last.path))
            for g in graph.groups
        ),
        followers={
            name: units
            for name, units in graph.followers.items()
            if not name.startswith(f"{last.path}.")
        },
        classes=shape[1],
        _positions={},
        _other_macs={},
    )
