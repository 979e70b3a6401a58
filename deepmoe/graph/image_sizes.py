"""Which sizes of images a network takes, and the shapes of its values for one of them."""

import math

import torch
from torch import Tensor, fx, nn

from deepmoe.graph.capture import evaluation_mode, one_tensor
from deepmoe.graph.shapes import Shapes, blank

OTHER_SIZES = ((9, 6), (32, 64))  # more than the images that a network is captured with
LEAST_TRIED = 16  # pixels a side, of smaller images


def size_is_fixed(program: fx.Graph, module: nn.Module, images: Tensor) -> bool:
    """Whether the captured code gives something else for images of another size."""
    if images.is_meta:
        return False
    (placeholder,) = program.find_nodes(op="placeholder")
    bounds = placeholder.meta.get("bounds", ((1, math.inf), (1, math.inf)))
    if any(upper < math.inf for _, upper in bounds):
        return True
    captured = fx.GraphModule(module, program)
    height, width = images.shape[-2:]
    others = [(height + more, width + wider) for more, wider in OTHER_SIZES]
    tried = False
    with evaluation_mode(module), torch.no_grad():
        for size in others:
            same = _gives_the_same(captured, module, images, size)
            if same is not None:
                tried = True
                if not same:
                    return True
                break
        # Below what an export takes for granted, a branch may be another one.
        below = (bounds[0][0] - 1, bounds[1][0] - 1)
        smaller = [(below[0], width), (height, below[1])]
        for size, least in zip(smaller, below, strict=True):
            if least >= LEAST_TRIED and _gives_the_same(captured, module, images, size) is False:
                return True
    return not tried


def _gives_the_same(
    captured: nn.Module, module: nn.Module, images: Tensor, size: tuple[int, int]
) -> bool | None:
    """Whether two networks agree on images of a size; `None` where the original takes none."""
    shape = (1, images.shape[1], *size)
    other = torch.randn(shape, device=images.device, dtype=images.dtype)
    try:
        expected = one_tensor(module(other))
    except Exception:  # of anybody's code: it may not take any size
        return None
    try:
        found = captured(other)
    except Exception:
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def takes(program: fx.Graph, skeleton: nn.Module, colours: int, side: int) -> bool:
    """Whether a network runs on square images of this side."""
    try:
        shapes_of(program, skeleton, colours, (side, side))
    except Exception:  # of anybody's code
        return False
    return True


def shapes_of(
    program: fx.Graph, skeleton: nn.Module, colours: int, size: tuple[int, int]
) -> dict[str, torch.Size]:
    """The shape of each node's value, for a batch of images of this size."""
    shapes = Shapes(skeleton, program)
    shapes.run(blank(colours, size))
    return {n.name: value.shape for n, value in shapes.env.items() if isinstance(value, Tensor)}
