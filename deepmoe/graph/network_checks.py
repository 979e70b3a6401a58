"""What can't be described: no networks, weights that serve twice."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn

from deepmoe.errors import UserError
from deepmoe.graph import functions
from deepmoe.graph.channels import Call


def check_arguments(module: Any, images: Any) -> None:
    """Refuses what is no network, or no images."""
    if not isinstance(module, nn.Module):
        kind = module if isinstance(module, type) else type(module)
        raise UserError(f"a network is a torch.nn.Module, not a {kind.__name__}")
    if not isinstance(images, Tensor):
        raise UserError(f"images are a tensor, such as the network takes, not {type(images)}")
    if images.dim() == 4 and not images.numel():
        raise UserError(f"images of shape {tuple(images.shape)} are empty: give at least one")


def check_weights(module: nn.Module, program: fx.Graph) -> None:
    """Refuses parameters that serve twice: what one use of them needs, the other may not."""
    owners: dict[Tensor, str] = {}
    for path, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            if parameter in owners:
                raise UserError(
                    f"{owners[parameter]} and {path} share a parameter: "
                    "give each weights of its own"
                )
            owners[parameter] = path
    for path, part in module.named_modules():
        if isinstance(part, nn.Conv2d | nn.Linear) and not isinstance(
            dict(part.named_parameters(recurse=False)).get("weight"), nn.Parameter
        ):
            raise UserError(
                f"the weight of {path} is computed (by weight norm, spectral norm or pruning): "
                "make it a parameter first"
            )
    called: set[str] = set()
    for node in program.find_nodes(op="call_module"):
        path = str(node.target)
        if path in called and module.get_submodule(path).state_dict():
            raise UserError(f"the layer {path} is called twice: give each call weights of its own")
        called.add(path)
    for node in program.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        others = [u for u in node.users if not _is_layer(u, node) and u.target is not getattr]
        if name == "weight" and others and (path in called or len(others) < len(node.users)):
            raise UserError(f"{node.target} is also used outside of its layer: give that its own")


def _is_layer(user: fx.Node, weight: fx.Node) -> bool:
    return user.target is functions.conv2d and user.args[1] is weight


def check_calls(calls: Sequence[Call]) -> None:
    """Refuses layers that are called twice, by whichever of their forms."""
    paths = [call.path for call in calls]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise UserError(f"the layer {twice[0]} is called twice: give each call weights of its own")
