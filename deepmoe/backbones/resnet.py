"""Residual networks: basic and bottleneck blocks, for CIFAR and ImageNet, dilated if asked."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.backbones.base import Backbone, Runner, initialise_convs, scaled_width
from deepmoe.errors import UserError
from deepmoe.layers import GatedConv, Layer, linear_layer


@dataclass(frozen=True)
class BlockKind:
    """The shape of a residual block: a chain of convolutions."""

    kernels: tuple[int, ...]
    strided: int  # the convolution that carries the stride
    expansion: int  # width of the residual stream over the stage's width
    gated: tuple[bool, ...]  # which inner outputs are gated, and widened


BLOCKS = {
    "basic": BlockKind(kernels=(3, 3), strided=0, expansion=1, gated=(True,)),
    "bottleneck-a": BlockKind(kernels=(1, 3, 1), strided=1, expansion=4, gated=(True, True)),
    "bottleneck-b": BlockKind(kernels=(1, 3, 1), strided=1, expansion=4, gated=(False, True)),
}


@dataclass(frozen=True)
class ResNetStage:
    """A run of blocks that share one width; the first block carries the stride."""

    blocks: int
    width: int
    stride: int = 1
    dilation: int = 1


@dataclass(frozen=True)
class ResNetSpec:
    """A residual network as plain data."""

    block: str
    stages: tuple[ResNetStage, ...]
    widths: tuple[tuple[int, ...], ...]  # for each block, the output width of its convolutions
    classes: int
    gates: Literal["inner", "all"] = "inner"
    stem: Literal["cifar", "imagenet"] = "imagenet"
    shortcut: Literal["pad", "conv"] = "conv"

    @property
    def kind(self) -> BlockKind:
        return BLOCKS[self.block]

    @property
    def gated(self) -> tuple[bool, ...]:
        """Which convolutions of a block are gated."""
        return (*self.kind.gated, self.gates == "all")


class PadShortcut(nn.Module):
    """Strided subsampling with zero channels appended: a shortcut without parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = out_channels - in_channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = x_BCHW[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.extra))


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + conv(...conv(x))), with a gate after each convolution that has a slot.

    Args:
        in_channels: width of the residual stream before the block.
        out_channels: width of the residual stream after it.
        kind: kernels, stride position and expansion.
        widths: output channels of each convolution. The last may be below `out_channels`, where
            gated outputs were physically removed: what is left is added to its channels only.
        slots: for each convolution, which of the network's gates follows it, or `None`.
        stride: of the block.
        dilation: of its 3x3 convolutions.
        shortcut: `pad` or `conv`, where the shortcut is not the identity.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kind: BlockKind,
        widths: Sequence[int],
        slots: Sequence[int | None],
        *,
        stride: int,
        dilation: int,
        shortcut: str,
    ) -> None:
        super().__init__()
        self.slots = tuple(slots)
        last = len(widths) - 1
        self.convs = nn.ModuleList(
            GatedConv(
                in_channels if i == 0 else widths[i - 1],
                widths[i],
                kernel,
                stride=stride if i == kind.strided else 1,
                dilation=dilation if kernel == 3 else 1,
                relu=i < last,
            )
            for i, kernel in enumerate(kind.kernels)
        )
        self.shortcut: nn.Module
        if stride == 1 and in_channels == out_channels:
            self.shortcut = nn.Identity()
        elif shortcut == "pad":
            self.shortcut = PadShortcut(in_channels, out_channels, stride)
        else:
            self.shortcut = GatedConv(in_channels, out_channels, 1, stride=stride, relu=False)
        self.stream_index: Tensor | None
        kept = torch.arange(widths[-1]) if widths[-1] < out_channels else None
        self.register_buffer("stream_index", kept)

    def gated_convs(self) -> list[GatedConv]:
        """The chain of convolutions, typed."""
        return [conv for conv in self.convs if isinstance(conv, GatedConv)]

    def forward(self, path: str, x_BCHW: Tensor, run: Runner) -> Tensor:
        """Runs the block that lies at this path of a network."""
        y, last = x_BCHW, len(self.convs) - 1
        for i in range(last):
            y = run.convolve(f"{path}.convs.{i}", y)
        if isinstance(self.shortcut, GatedConv):
            stream = run.convolve(f"{path}.shortcut", x_BCHW)
        else:
            stream = self.shortcut(x_BCHW)
        return run.convolve_onto(f"{path}.convs.{last}", y, stream, self.stream_index)


class ResNet(Backbone):
    """Stem, stages of residual blocks, global pooling, a linear classifier."""

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__()
        self.spec = spec
        stem_width = spec.stages[0].width
        imagenet = spec.stem == "imagenet"
        self.stem = GatedConv(3, stem_width, 7 if imagenet else 3, stride=2 if imagenet else 1)
        stages: list[nn.Module] = []
        gate_widths: list[int] = []
        stream = stem_width
        widths_of_blocks = iter(spec.widths)
        for stage in spec.stages:
            blocks = []
            for b in range(stage.blocks):
                widths = next(widths_of_blocks)
                slots: list[int | None] = []
                for width, gated in zip(widths, spec.gated, strict=True):
                    slots.append(len(gate_widths) if gated else None)
                    gate_widths += [width] if gated else []
                out = stage.width * spec.kind.expansion
                blocks.append(
                    ResidualBlock(
                        stream,
                        out,
                        spec.kind,
                        widths,
                        slots,
                        stride=stage.stride if b == 0 else 1,
                        dilation=stage.dilation,
                        shortcut=spec.shortcut,
                    )
                )
                stream = out
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.gate_widths = tuple(gate_widths)
        self.gate_slots = {"stem": None}
        for path, block in self.blocks():
            self.gate_slots[f"{path}.shortcut"] = None
            for i, slot in enumerate(block.slots):
                self.gate_slots[f"{path}.convs.{i}"] = slot
        self.fc = self._make_classifier(stream, spec.classes)
        initialise_convs(self)

    def _make_classifier(self, channels: int, classes: int) -> nn.Module:
        return nn.Linear(channels, classes)

    def blocks(self) -> Iterator[tuple[str, ResidualBlock]]:
        """Every block in order, with its path."""
        for s, stage in enumerate(self.stages):
            assert isinstance(stage, nn.Sequential)
            for b, block in enumerate(stage):
                assert isinstance(block, ResidualBlock)
                yield f"stages.{s}.{b}", block

    def wire_before_gates(self, x_BCHW: Tensor, run: Runner) -> Tensor:
        x = run.convolve("stem", x_BCHW)
        return run.max_pool(x, 3, stride=2, padding=1) if self.spec.stem == "imagenet" else x

    def wire_gated(self, x_BCHW: Tensor, run: Runner, size: tuple[int, int]) -> Tensor:
        return run.classify("fc", self.wire_blocks(x_BCHW, run).mean(dim=(2, 3)))

    def wire_blocks(self, x_BCHW: Tensor, run: Runner) -> Tensor:
        """The residual stream after the last block."""
        for path, block in self.blocks():
            x_BCHW = block(path, x_BCHW, run)
        return x_BCHW

    def layers(self, height: int, width: int) -> list[Layer]:
        size = self.stem.output_size(height, width)
        found = [self.stem.describe("stem", size)]
        if self.spec.stem == "imagenet":
            size = ((size[0] - 1) // 2 + 1, (size[1] - 1) // 2 + 1)
        for path, block in self.blocks():
            entry, before = size, None
            for i, conv in enumerate(block.gated_convs()):
                size, slot = conv.output_size(*size), block.slots[i]
                found.append(conv.describe(f"{path}.convs.{i}", size, before, slot))
                before = slot
            if isinstance(block.shortcut, GatedConv):
                at = block.shortcut.output_size(*entry)
                found.append(block.shortcut.describe(f"{path}.shortcut", at))
        found.append(self._classifier_layer(size))
        return found

    def _classifier_layer(self, size: tuple[int, int]) -> Layer:
        assert isinstance(self.fc, nn.Linear)
        return linear_layer("fc", self.fc)

    def additions(self) -> list[tuple[str, str]]:
        return [
            (f"{path}.shortcut", f"{path}.convs.{len(block.convs) - 1}")
            for path, block in self.blocks()
            if isinstance(block.shortcut, GatedConv)
        ]

    def resized(self, gate_widths: Sequence[int]) -> Self:
        new = iter(gate_widths)
        widths = tuple(
            tuple(next(new) if gated else w for w, gated in zip(old, self.spec.gated, strict=True))
            for old in self.spec.widths
        )
        return type(self)(dataclasses.replace(self.spec, widths=widths))

    def _narrowed_state(self, masks: Sequence[Tensor]) -> dict[str, Tensor]:
        state = super()._narrowed_state(masks)
        for path, block in self.blocks():
            slot, at = block.slots[-1], block.stream_index
            if slot is None or (at is None and masks[slot].all()):
                continue
            at = torch.arange(len(masks[slot])) if at is None else at
            state[f"{path}.stream_index"] = at[masks[slot].to(at.device)]
        return state


def make_spec(
    stages: Sequence[ResNetStage],
    classes: int,
    *,
    block: str,
    wide: float = 1.0,
    widths: Sequence[int] | None = None,
    gates: str = "inner",
    stem: Literal["cifar", "imagenet"] = "imagenet",
    shortcut: Literal["pad", "conv"] = "conv",
) -> ResNetSpec:
    """Lays out a residual network.

    Args:
        stages: blocks, widths, strides and dilations.
        classes: number of classes.
        block: a name from `BLOCKS`.
        wide: factor on the widths that are gated inside a block; the residual stream keeps its own.
        widths: instead of the stages' widths, the output width of every inner convolution: one a
            basic block, two a bottleneck.
        gates: `inner`, or `all` to gate also what each block adds to the residual stream.
        stem: one 3x3 convolution (`cifar`), or a strided 7x7 and max pooling (`imagenet`).
        shortcut: zero-padded (`pad`) or a 1x1 convolution (`conv`) where shapes change.
    """
    if block not in BLOCKS:
        raise UserError(f"no block is named {block!r}; there are {', '.join(BLOCKS)}")
    if gates not in ("inner", "all"):
        raise UserError(f"a residual network's gates are inner or all, not {gates!r}")
    if isinstance(widths, str):
        raise UserError(f"only vgg16 has named widths, so {widths!r} must be a list here")
    kind = BLOCKS[block]
    plan = [stage for stage in stages for _ in range(stage.blocks)]
    inner = len(kind.gated)
    if widths is None:
        widths = [stage.width for stage in plan for _ in range(inner)]
    elif len(widths) != inner * len(plan):
        raise UserError(
            f"this network has {inner * len(plan)} inner convolutions, but got {len(widths)} widths"
        )
    factors = [wide if gated else 1.0 for gated in kind.gated]
    per_block = tuple(
        (
            *(scaled_width(widths[inner * b + i], factors[i]) for i in range(inner)),
            stage.width * kind.expansion,
        )
        for b, stage in enumerate(plan)
    )
    return ResNetSpec(
        block=block,
        stages=tuple(stages),
        widths=per_block,
        classes=classes,
        gates="all" if gates == "all" else "inner",
        stem=stem,
        shortcut=shortcut,
    )


def cifar_stages(depth: int) -> list[ResNetStage]:
    """Stages of ResNet-20, -32, -44, -56 and -110: three, of widths 16, 32 and 64."""
    blocks = (depth - 2) // 6
    return [
        ResNetStage(blocks, 16),
        ResNetStage(blocks, 32, stride=2),
        ResNetStage(blocks, 64, stride=2),
    ]


IMAGENET_DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def imagenet_stages(depth: int) -> list[ResNetStage]:
    """Stages of ResNet-18, -34, -50 and -101: four, of widths 64 to 512."""
    counts = IMAGENET_DEPTHS[depth]
    return [ResNetStage(n, 64 * 2**s, stride=1 if s == 0 else 2) for s, n in enumerate(counts)]


def torchvision_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames the weights of a torchvision ResNet to those of `ResNet`.

    So that `create_model("resnet50").backbone.load_state_dict(torchvision_state(weights))` works.
    """
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in _TORCHVISION_NAMES:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


_TORCHVISION_NAMES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"^conv1\.", "stem.conv."),
    (r"^bn1\.", "stem.bn."),
    (r"^layer(\d)\.", lambda m: f"stages.{int(m[1]) - 1}."),
    (r"\.(conv|bn)(\d)\.", lambda m: f".convs.{int(m[2]) - 1}.{m[1]}."),
    (r"\.downsample\.0\.", ".shortcut.conv."),
    (r"\.downsample\.1\.", ".shortcut.bn."),
]
