"""What makes gates of an image."""

from deepmoe.layers.agent import PruningAgent
from deepmoe.layers.codebook import RouteCodebook
from deepmoe.layers.embedding import ConvNormReLU, ShallowEmbedding
from deepmoe.layers.feature_heads import Decisions, FeatureBoosting, FeatureHeads
from deepmoe.layers.heads import GateHeads, Gates, NoisyTopKHeads
from deepmoe.layers.scale_factors import ScaleFactors

__all__ = [
    "ConvNormReLU",
    "Decisions",
    "FeatureBoosting",
    "FeatureHeads",
    "GateHeads",
    "Gates",
    "NoisyTopKHeads",
    "PruningAgent",
    "RouteCodebook",
    "ScaleFactors",
    "ShallowEmbedding",
]
