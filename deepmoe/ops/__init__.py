"""Operations on gated channels: the plain reference and what training runs."""

from deepmoe.ops.gating import scale_channels
from deepmoe.ops.pooling import max_pool
from deepmoe.ops.precision import at_least_single, is_half
from deepmoe.ops.reference import mixture_of_experts_conv2d
from deepmoe.ops.residual import onto_stream

__all__ = [
    "at_least_single",
    "is_half",
    "max_pool",
    "mixture_of_experts_conv2d",
    "onto_stream",
    "scale_channels",
]
