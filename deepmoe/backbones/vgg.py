"""VGG with batch norm and one linear layer, as used on CIFAR."""

from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn

from deepmoe.backbones.base import Backbone, Runner, initialise_convs, scaled_width
from deepmoe.errors import UserError
from deepmoe.layers import GatedConv, Layer, linear_layer

CONVS_PER_STAGE = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
STAGE_WIDTHS = (64, 128, 256, 512, 512)

# The widening strategies of the paper: about equal parameters, placed differently in the network.
VGG16_WIDTHS = {
    "w1-high": (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 1536, 512, 512),
    "w1-mid": (64, 64, 128, 128, 2990, 256, 256, 512, 512, 512, 512, 512, 512),
    "w4-low": (512, 512, 615, 615, 256, 256, 256, 512, 512, 512, 512, 512, 512),
    "w13-all": (128, 128, 256, 256, 405, 405, 405, 615, 615, 615, 615, 615, 615),
}


class VGG(Backbone):
    """Stages of gated 3x3 convolutions, each followed by 2x2 max pooling.

    Args:
        convs_per_stage: number of convolutions before each pooling.
        widths: output channels of every convolution.
        classes: number of classes.
        gate_last: also gate the last convolution. Off by default: that gate is a shortcut from
            the embedding to the logits, and the network learns to copy the embedding's guess.
    """

    def __init__(
        self,
        convs_per_stage: Sequence[int],
        widths: Sequence[int],
        classes: int,
        *,
        gate_last: bool = False,
    ) -> None:
        super().__init__()
        if len(widths) != sum(convs_per_stage):
            raise UserError(
                f"this VGG has {sum(convs_per_stage)} convolutions, but got {len(widths)} widths"
            )
        self.convs_per_stage = tuple(convs_per_stage)
        self.widths = tuple(widths)
        self.gate_last = gate_last
        self.gate_widths = self.widths if gate_last else self.widths[:-1]
        inputs = (3, *self.widths[:-1])
        self.convs = nn.ModuleList(
            GatedConv(i, o, 3) for i, o in zip(inputs, self.widths, strict=True)
        )
        self.classifier = nn.Linear(self.widths[-1], classes)
        last_of_stage = [sum(convs_per_stage[: s + 1]) - 1 for s in range(len(convs_per_stage))]
        self.pools_after = frozenset(last_of_stage)
        self.gate_slots = {f"convs.{i}": self._gate_after(i) for i in range(len(self.convs))}
        initialise_convs(self)

    def wire_gated(self, x_BCHW: Tensor, run: Runner, size: tuple[int, int]) -> Tensor:
        x = x_BCHW
        for i in range(len(self.convs)):
            if i in self.pools_after:
                x = run.convolve_and_pool(f"convs.{i}", x, 2, stride=2)
            else:
                x = run.convolve(f"convs.{i}", x)
        return run.classify("classifier", x.mean(dim=(2, 3)))

    def layers(self, height: int, width: int) -> list[Layer]:
        smallest = 2 ** len(self.convs_per_stage)
        if min(height, width) < smallest:
            raise UserError(
                f"this VGG halves its input {len(self.convs_per_stage)} times and needs at least "
                f"{smallest} px a side, not {height}x{width}"
            )
        found = []
        size = (height, width)
        for i, conv in enumerate(self.convs):
            assert isinstance(conv, GatedConv)
            in_gate, out_gate = self._gate_after(i - 1), self._gate_after(i)
            found.append(conv.describe(f"convs.{i}", size, in_gate, out_gate))
            if i in self.pools_after:
                size = (size[0] // 2, size[1] // 2)
        found.append(linear_layer("classifier", self.classifier, self._gate_after(i)))
        return found

    def _gate_after(self, conv: int) -> int | None:
        return conv if 0 <= conv < len(self.gate_widths) else None

    def resized(self, gate_widths: Sequence[int]) -> Self:
        return type(self)(
            self.convs_per_stage,
            (*gate_widths, *self.widths[len(gate_widths) :]),
            self.classifier.out_features,
            gate_last=self.gate_last,
        )


def make_vgg(
    depth: int,
    classes: int,
    *,
    wide: float = 1.0,
    widths: str | Sequence[int] | None = None,
    gates: str = "inner",
    gate_last: bool = False,
) -> VGG:
    """Builds VGG-`depth`.

    Args:
        depth: 11, 13, 16 or 19.
        classes: number of classes.
        wide: factor on the width of every convolution.
        widths: output channels of every convolution, or (VGG-16) a widening strategy's name.
        gates: `inner` or `all`, which are the same here: a VGG has no residual stream to gate.
        gate_last: see `VGG`.
    """
    if gates not in ("inner", "all"):
        raise UserError(f"the gates of a VGG are inner or all, not {gates!r}")
    stages = CONVS_PER_STAGE[depth]
    if isinstance(widths, str):
        if depth != 16 or widths not in VGG16_WIDTHS:
            raise UserError(
                f"vgg{depth} knows no widths named {widths!r}; "
                f"vgg16 has {', '.join(VGG16_WIDTHS)}, and any VGG takes a list"
            )
        widths = VGG16_WIDTHS[widths]
    elif widths is None:
        widths = [w for w, count in zip(STAGE_WIDTHS, stages, strict=True) for _ in range(count)]
    return VGG(stages, [scaled_width(w, wide) for w in widths], classes, gate_last=gate_last)
