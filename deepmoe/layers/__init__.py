"""What makes gates of an image."""

from deepmoe.layers.codebook import RouteCodebook
from deepmoe.layers.embedding import ConvNormReLU, ShallowEmbedding
from deepmoe.layers.heads import GateHeads, Gates, NoisyTopKHeads
from deepmoe.layers.scale_factors import ScaleFactors

__all__ = [
    "ConvNormReLU",
    "GateHeads",
    "Gates",
    "NoisyTopKHeads",
    "RouteCodebook",
    "ScaleFactors",
    "ShallowEmbedding",
]
