"""Gate heads: from mixture weights to one gate a channel, for all layers at once."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.errors import UserError

Gates = tuple[Tensor, ...]
"""One g_BC tensor for each gated group of channels, in the order of `Gating.widths`."""


class GateHeads(nn.Module):
    """Multi-headed sparse gating: g^l = ReLU(W^l e), no bias.

    The heads' matrices are stored as one, stacked in layer order, so that one product gives the
    gates of the whole network.

    Args:
        dim: number of mixture weights.
        widths: gates of each gated group of channels.
        init: see `initialise`.
    """

    kind = "relu"

    def __init__(self, dim: int, widths: Sequence[int], *, init: str = "ones") -> None:
        super().__init__()
        self.widths = list(widths)
        self.weight = nn.Parameter(torch.empty(sum(widths), dim))
        for of_layer in self.weight.split(self.widths):
            initialise(of_layer, init)

    def forward(self, e_BD: Tensor) -> Gates:
        return self.concatenated(e_BD).split(self.widths, dim=1)

    def concatenated(self, e_BD: Tensor) -> Tensor:
        """The gates of all layers as one tensor."""
        return F.relu(project(e_BD, self.weight))

    @property
    def macs(self) -> int:
        """MACs of an image's gates."""
        return self.weight.numel()

    @torch.no_grad()
    def close(self, channels: Tensor) -> None:
        """Closes these channels, counted over all layers, for every image."""
        # Mixture weights are not negative: without a positive weight, a gate never opens.
        self.weight[channels] -= self.weight[channels].amax(dim=1, keepdim=True).clamp_min(0)

    @torch.no_grad()
    def order_by_strength(self, strengths: Sequence[Tensor]) -> None:
        """Hands each layer's gates out anew: a stronger channel gets a larger gate."""
        for weight, strength in zip(self.weight.split(self.widths), strengths, strict=True):
            order = strength.argsort(descending=True, stable=True).to(weight.device)
            weight[order] = weight[weight.mean(dim=1).argsort(descending=True, stable=True)]


class NoisyTopKHeads(nn.Module):
    """Noisy top-k gating (Shazeer et al. 2017), one head a layer, as an alternative to ReLU.

    H = W e + N(0, 1) * softplus(W_noise e) in training, H = W e in evaluation; the k largest
    entries of each layer go through a softmax, all others are zero. There a layer's gates sum to
    one; here, unless `total` says so, to k: a channel is one of hundreds, and batch norm could not
    tell what is left of it from nothing.

    Args:
        dim: number of mixture weights.
        widths: gates of each gated group of channels.
        share: share of each layer's channels that is kept; at least one is.
        init: of W, as in `GateHeads`; `ones` and `split` would tie channels, and are refused.
        total: what a layer's gates sum to: `kept`, their number, or `one`.
    """

    kind = "noisy-topk"

    def __init__(
        self,
        dim: int,
        widths: Sequence[int],
        *,
        share: float = 0.5,
        init: str = "normal(0, 1)",
        total: Literal["kept", "one"] = "kept",
    ) -> None:
        super().__init__()
        if init.strip() == "ones" or init.strip().startswith("split"):
            raise UserError(f"noisy top-k heads can't start from {init}, where channels tie")
        if not 0 < share <= 1:
            raise UserError(
                f"the share of kept channels must be above 0 and at most 1, not {share}"
            )
        self.widths = list(widths)
        self.share = share
        self.total = total
        self.kept = kept_of(share, widths)
        self.weight = nn.Parameter(torch.empty(sum(widths), dim))
        self.noise_weight = nn.Parameter(torch.zeros(sum(widths), dim))
        for of_layer in self.weight.split(self.widths):
            initialise(of_layer, init)

    def forward(self, e_BD: Tensor) -> Gates:
        h = project(e_BD, self.weight)
        if self.training:
            h = h + torch.randn_like(h) * F.softplus(project(e_BD, self.noise_weight))
        layers = zip(h.split(self.widths, dim=1), self.kept, strict=True)
        return tuple(
            _softmax_of_top(h_BC, k) * (k if self.total == "kept" else 1) for h_BC, k in layers
        )

    def concatenated(self, e_BD: Tensor) -> Tensor:
        """The gates of all layers as one tensor."""
        return torch.cat(self(e_BD), dim=1)

    @property
    def macs(self) -> int:
        """MACs of an image's gates in evaluation, where there is no noise."""
        return self.weight.numel()


def kept_of(share: float, widths: Sequence[int]) -> list[int]:
    """How many channels of each layer a share of them is; at least one."""
    return [max(1, round(share * width)) if width else 0 for width in widths]


def project(e_BD: Tensor, weight_CD: Tensor) -> Tensor:
    """A linear map in full precision, even under autocast."""
    # A rounded gate could switch a channel on or off.
    with without_autocast(e_BD.device):
        return F.linear(e_BD.to(weight_CD.dtype), weight_CD)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Full precision on a device, whatever is around."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext()


def _softmax_of_top(h_BC: Tensor, k: int) -> Tensor:
    top = h_BC.topk(k, dim=1)
    return torch.zeros_like(h_BC).scatter(1, top.indices, top.values.softmax(dim=1))


_INIT = re.compile(r"(\w+)\(([^()]*)\)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
CLOSED = (-0.5, 0.0)  # where `split` starts the channels that are not open


@torch.no_grad()
def initialise(weight: Tensor, init: str) -> None:
    """Fills a layer's gate matrix.

    Args:
        weight: to fill; a row for each gate, a column for each mixture weight.
        init: `ones`, `uniform(a, b)`, `normal(m, s)`, or `linear`: as a linear layer of PyTorch
            starts, uniform within 1 / sqrt(mixture weights); or, alike for all images at first,
            `channels(m, s)`: one normal number for each gate, or `split(p)`: a share p of the
            gates at one, all others closed. `split(p, s)` spreads the open ones evenly from
            1 + s to 1 - s.
    """
    if init.strip() == "ones":
        nn.init.ones_(weight)
        return
    if init.strip() == "linear":
        nn.init.kaiming_uniform_(weight, a=5**0.5)  # as torch.nn.Linear does it
        return
    found = _INIT.fullmatch(init.strip())
    name, text = found.groups() if found else ("", "")
    fill, counts = _FILL.get(name, (None, ()))
    numbers = [float(n) for n in map(str.strip, text.split(",")) if _NUMBER.fullmatch(n)]
    if fill is None or len(numbers) not in counts or len(numbers) != 1 + text.count(","):
        raise UserError(
            "gate init is ones, linear, uniform(a, b), normal(m, s), channels(m, s), split(p) or "
            f"split(p, s), not {init!r}"
        )
    try:
        fill(weight, *numbers)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"gate init {init!r} is out of range: {error}") from error


def _fill_channels(weight: Tensor, mean: float, deviation: float) -> None:
    weight.copy_(nn.init.normal_(weight[:, :1].clone(), mean, deviation))


def _fill_split(weight: Tensor, share: float, spread: float = 0.0) -> None:
    if not 0 <= share <= 1 or not 0 <= spread < 1:
        raise ValueError("a share lies from 0 to 1, a spread below 1")
    column = nn.init.uniform_(weight[:, :1].clone(), *CLOSED)
    opened = torch.randperm(len(column))[: round(share * len(column))]
    column[opened, 0] = torch.linspace(1 + spread, 1 - spread, len(opened)).to(column)
    weight.copy_(column)


# What fills a matrix, and how many numbers it may take.
_FILL: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
    "uniform": (nn.init.uniform_, (2,)),
    "normal": (nn.init.normal_, (2,)),
    "channels": (_fill_channels, (2,)),
    "split": (_fill_split, (1, 2)),
}
