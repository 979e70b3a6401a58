"""Widths within reason, and how convolutions start."""

from torch import nn

from deepmoe.errors import UserError

MOST_WIDE = 1000
MOST_CHANNELS = 1_000_000


def scaled_width(width: int, wide: float) -> int:
    """A width times the widening factor, at least 1."""
    if not 0 < wide <= MOST_WIDE or not 1 <= width <= MOST_CHANNELS:
        raise UserError(
            f"width {width} times {wide} is out of range: widths lie from 1 to {MOST_CHANNELS:,}, "
            f"and the factor above 0 and at most at {MOST_WIDE:,}"
        )
    return max(1, round(width * wide))


def initialise_convs(network: nn.Module) -> None:
    """He initialisation by fan-out, for convolutions that BN and ReLU follow."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
