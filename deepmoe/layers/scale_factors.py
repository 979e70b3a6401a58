"""Scaling factors: one number a channel, the same for all images (Huang and Wang 2018)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmoe.layers.heads import Gates


class ScaleFactors(nn.Module):
    """Gates that do not depend on the image, to find out which channels can go.

    They start at one, and learn by a proximal step that sets the needless ones to zero. No
    embedding is needed, and none of this is left once channels are removed: what stays is
    multiplied into the weights.

    Args:
        widths: of each gated group of channels.
    """

    kind = "scale"
    macs = 0  # they are multiplied into weights

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = list(widths)
        self.weight = nn.Parameter(torch.ones(sum(widths)))

    def of_images(self, x_BCHW: Tensor) -> Gates:
        """The factors, for each image of a batch."""
        g_BC = self.weight.expand(len(x_BCHW), -1)
        return g_BC.split(self.widths, dim=1)
