"""Route codebook: the gates of each image, replaced by the nearest of a few fixed routes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmoe.layers.heads import Gates, project


class RouteCodebook(nn.Module):
    """Replaces each image's gates by those of the nearest code, so that few routes remain.

    Routes are near when they run the same channels, about as strongly. The distance of gates g and
    a code k is the sum over channels of

        weight * ((1{g > 0} - 1{k > 0})^2 + (g / scale - k / scale)^2)

    with one scale a layer: the mean positive gate of its codes.

    Args:
        codes_KC: gates of each code, over the channels of all layers in order; not negative.
        weight_C: what a channel counts for in the distance, such as its cost.
        widths: gates of each gated group of channels.
    """

    codes: Tensor
    weight: Tensor
    scale: Tensor
    code_features: Tensor
    half_norms: Tensor

    def __init__(self, codes_KC: Tensor, weight_C: Tensor, widths: Sequence[int]) -> None:
        super().__init__()
        channels = sum(widths)
        if codes_KC.dim() != 2 or not len(codes_KC) or codes_KC.shape[1] != channels:
            raise ValueError(f"codes must be rows of {channels}, not {tuple(codes_KC.shape)}")
        if weight_C.shape != (channels,):
            raise ValueError(f"weight must hold {channels}, not {tuple(weight_C.shape)}")
        self.widths = list(widths)
        self.register_buffer("codes", codes_KC.detach().to(torch.float32, copy=True))
        self.register_buffer("weight", weight_C.detach().to(torch.float32, copy=True))
        _derive(self)
        self.register_load_state_dict_post_hook(_derive)

    def nearest(self, gates: Gates) -> Tensor:
        """The index of each image's nearest code, the first of several; int64 of shape (B,)."""
        features = self.features(torch.cat(gates, dim=1).detach(), self.scale, self.weight)
        # |f - k|^2 = |f|^2 + 2 (|k|^2 / 2 - f k), where the first term is the same for all codes.
        products_BK = project(features, self.code_features.float())
        return (self.half_norms.float() - products_BK).argmin(dim=1)

    def forward(self, gates: Gates) -> Gates:
        codes_BC = self.codes[self.nearest(gates)].to(gates[0].dtype)
        return codes_BC.split(self.widths, dim=1)

    @torch.no_grad()
    def close(self, channels: Tensor) -> None:
        """Closes these channels, counted over all layers, in every code."""
        self.codes[:, channels] = 0.0
        _derive(self)

    @staticmethod
    def scales(gates_BC: Tensor, widths: Sequence[int]) -> Tensor:
        """The mean positive gate of each layer, or 1 where it has none; one number a channel."""
        means = []
        for g_BC in gates_BC.split(list(widths), dim=1):
            running = (g_BC > 0).sum()
            mean = g_BC.sum(dtype=torch.float64) / running.clamp_min(1)
            means.append(torch.where(running > 0, mean, 1.0).float().expand(g_BC.shape[1]))
        return torch.cat(means)

    @staticmethod
    def features(gates_BC: Tensor, scale_C: Tensor, weight_C: Tensor) -> Tensor:
        """Features whose squared Euclidean distance is the distance of routes; (B, 2C)."""
        gates_BC = gates_BC.float()
        root_C = weight_C.float().sqrt()
        runs_BC = (gates_BC > 0).float()
        return torch.cat([runs_BC * root_C, gates_BC / scale_C.float() * root_C], dim=1)


def _derive(codebook: RouteCodebook, _: object = None) -> None:
    """Works out what follows from the codes, when they are given and when they are loaded."""
    codes_KC = codebook.codes.float()
    scale = codebook.scales(codes_KC, codebook.widths)
    features = codebook.features(codes_KC, scale, codebook.weight)
    # Summed in double precision, so that every device finds the same.
    half_norms = (features.square().sum(dim=1, dtype=torch.float64) / 2).float()
    codebook.register_buffer("scale", scale, persistent=False)
    codebook.register_buffer("code_features", features, persistent=False)
    codebook.register_buffer("half_norms", half_norms, persistent=False)
