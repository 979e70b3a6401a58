"""The layers that read a group of channels, and what stands right behind them."""

from dataclasses import dataclass

from torch import Tensor, fx, nn

from deepmoe.compare.task import PruningTask
from deepmoe.errors import UserError
from deepmoe.graph import Group, Layer
from deepmoe.graph.operations import ADDITIONS, name_of

PASSING = {"identity", "dropout", "dropout2d"}  # that leave in evaluation what they read


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads a group, and what follows right behind.

    Attributes:
        layer: with its units.
        node: of the graph.
        norm: path of the batch norm that alone reads the layer's output, if there is one.
        addition: where the result, behind the norm, meets a shortcut.
        shortcut: what it meets there.
    """

    layer: Layer
    node: fx.Node
    norm: str | None
    addition: fx.Node | None
    shortcut: fx.Node | None

    @property
    def path(self) -> str:
        """Of the layer in the network."""
        return self.layer.path

    def weight(self, network: nn.Module) -> Tensor:
        """The layer's weights as (outputs, inputs, places of the kernel), a view of them."""
        weight = network.get_submodule(self.path).weight
        assert isinstance(weight, Tensor)
        return weight.detach().flatten(2) if weight.dim() > 2 else weight.detach()[..., None]


def readers_of(task: PruningTask, group: Group) -> list[Reader]:
    """The layers that read a group, in the order in which they run."""
    graph = task.gating.graph
    nodes = {node.name: node for node in graph.program.nodes}
    root, found = task.model.network, []
    for layer in graph.layers:
        if layer.path not in group.readers:
            continue
        if not isinstance(root.get_submodule(layer.path), nn.Conv2d | nn.Linear):
            raise UserError(f"this method reads convolutions and linear layers, not {layer.path}")
        node, norm = nodes[layer.node], None
        end, user = node, _only_user(node)
        if user is not None and user.op == "call_module":
            module = root.get_submodule(str(user.target))
            if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                end, norm = user, str(user.target)
                user = _only_user(end)
        while user is not None and name_of(user, root) in PASSING:
            end, user = user, _only_user(user)
        addition, shortcut = user, None
        if addition is not None and name_of(addition, root) in ADDITIONS and not addition.kwargs:
            others = [arg for arg in addition.args if arg is not end]
            shortcut = others[0] if isinstance(others[0], fx.Node) else None
        found.append(
            Reader(layer, node, norm, addition if shortcut is not None else None, shortcut)
        )
    return found


def _only_user(node: fx.Node) -> fx.Node | None:
    (user,) = node.users if len(node.users) == 1 else (None,)
    return user if user is None or user.op.startswith("call") else None
