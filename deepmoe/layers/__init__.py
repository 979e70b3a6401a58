"""The parts a gated network is made of."""

from deepmoe.layers.codebook import RouteCodebook
from deepmoe.layers.description import Layer, conv_layer, linear_layer
from deepmoe.layers.embedding import ShallowEmbedding
from deepmoe.layers.gated_conv import GatedConv
from deepmoe.layers.heads import GateHeads, Gates, NoisyTopKHeads

__all__ = [
    "GateHeads",
    "GatedConv",
    "Gates",
    "Layer",
    "NoisyTopKHeads",
    "RouteCodebook",
    "ShallowEmbedding",
    "conv_layer",
    "linear_layer",
]
