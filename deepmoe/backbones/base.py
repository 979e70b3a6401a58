"""What every base network offers: a gated forward, its layers as data, a smaller copy."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.layers import Layer
from deepmoe.ops import add_to_stream, max_pool


class Runner(Protocol):
    """What runs at the layers of a backbone, which are named by their paths."""

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        """Convolution, batch norm, gate and (where the layer has one) ReLU."""

    def convolve_onto(
        self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor, at: Tensor | None
    ) -> Tensor:
        """Adds a convolution to the residual stream, then ReLU.

        Args:
            path: of the convolution.
            x_BCHW: its input.
            stream_BCHW: what it is added to.
            at: where some outputs were removed, the channels of the stream that the others are for.
        """

    def max_pool(self, x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
        """Max pooling over squares."""
        return max_pool(x_BCHW, size, stride, padding)

    def convolve_and_pool(self, path: str, x_BCHW: Tensor, size: int, stride: int) -> Tensor:
        """A convolution with all that belongs to it, then max pooling."""
        return self.max_pool(self.convolve(path, x_BCHW), size, stride)

    def classify(self, path: str, x: Tensor) -> Tensor:
        """The classifier, a linear layer or a convolution."""


class Backbone(nn.Module, ABC):
    """A base network whose convolutions can be gated channel by channel."""

    gate_widths: tuple[int, ...]
    """Channels of each gated convolution, in the order in which `forward` takes the gates."""

    gate_slots: dict[str, int | None]
    """For the path of each convolution, which of the gates follows it."""

    def forward(self, x_BCHW: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """Class logits. `gates` holds one g_BC tensor a gated convolution; `None` runs dense."""
        self.check_gates(gates)
        return self.wire(x_BCHW, ModuleRunner(self, gates))

    def wire(self, x_BCHW: Tensor, run: Runner) -> Tensor:
        """How the layers are connected; what runs at each of them is up to the runner."""
        size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
        return self.wire_gated(self.wire_before_gates(x_BCHW, run), run, size)

    def wire_before_gates(self, x_BCHW: Tensor, run: Runner) -> Tensor:
        """The first layers, as far as they are the same whatever the gates are."""
        return x_BCHW

    @abstractmethod
    def wire_gated(self, x_BCHW: Tensor, run: Runner, size: tuple[int, int]) -> Tensor:
        """The other layers, for an image that had this size."""

    @abstractmethod
    def layers(self, height: int, width: int) -> list[Layer]:
        """Every convolution and linear layer, for an input of this size."""

    def additions(self) -> list[tuple[str, str]]:
        """Paths of two convolutions, neither with a ReLU of its own, that are added up at once."""
        return []

    @abstractmethod
    def resized(self, gate_widths: Sequence[int]) -> Self:
        """A new, untrained network of the same class with other widths of gated convolutions."""

    def narrow(self, keep: Sequence[Tensor]) -> Self:
        """Removes channels physically.

        Args:
            keep: for each gated convolution, a boolean mask of the channels to keep.

        Returns:
            A smaller network of the same class with its own copy of the weights. With the kept
            gates it gives the outputs that this one gives when the gates of the others are zero.
        """
        if [len(mask) for mask in keep] != list(self.gate_widths):
            raise UserError(f"keep must hold masks of lengths {list(self.gate_widths)}")
        masks = [mask.detach().to("cpu", torch.bool) for mask in keep]
        with torch.device("meta"), warnings.catch_warnings():
            # A layer may lose all of its channels; torch warns that it can't initialise it.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            small = self.resized([int(mask.sum()) for mask in masks])
        small.load_state_dict(self._narrowed_state(masks), assign=True)
        for parameter, original in zip(small.parameters(), self.parameters(), strict=True):
            parameter.requires_grad_(original.requires_grad)
        return small.train(self.training)

    def _narrowed_state(self, masks: Sequence[Tensor]) -> dict[str, Tensor]:
        source = self.state_dict()
        narrowed = {}
        for layer in self.layers(*ANY_SIZE):
            for name in (n for n in source if n.startswith(f"{layer.path}.")):
                tensor = source[name]
                if layer.out_gate is not None and tensor.ndim >= 1:
                    tensor = tensor[masks[layer.out_gate].to(tensor.device)]
                if layer.in_gate is not None and tensor.ndim >= 2:
                    tensor = tensor[:, masks[layer.in_gate].to(tensor.device)]
                narrowed[name] = tensor.clone()
        return narrowed

    @property
    def classes(self) -> int:
        """Number of classes that the logits tell apart."""
        return self.layers(*ANY_SIZE)[-1].out_channels

    def check_gates(self, gates: Sequence[Tensor] | None) -> None:
        """Refuses gates that don't fit this network."""
        if gates is not None and [g.shape[1] for g in gates] != list(self.gate_widths):
            raise UserError(
                f"expected gates of widths {list(self.gate_widths)}, "
                f"got {[g.shape[1] for g in gates]}"
            )


class ModuleRunner(Runner):
    """Runs the backbone's own modules, with gates or dense."""

    def __init__(self, backbone: Backbone, gates: Sequence[Tensor] | None) -> None:
        self.backbone = backbone
        self.gates = gates

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        slot = self.backbone.gate_slots[path]
        gate = self.gates[slot] if self.gates is not None and slot is not None else None
        return self.backbone.get_submodule(path)(x_BCHW, gate)

    def convolve_onto(
        self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor, at: Tensor | None
    ) -> Tensor:
        return add_to_stream(stream_BCHW, self.convolve(path, x_BCHW), at)

    def classify(self, path: str, x: Tensor) -> Tensor:
        return self.backbone.get_submodule(path)(x)


MOST_WIDE = 1000
MOST_CHANNELS = 1_000_000
ANY_SIZE = (512, 512)  # where only the connections of the layers matter, not their cost


def scaled_width(width: int, wide: float) -> int:
    """A width times the widening factor, at least 1 unless it was 0."""
    if not 0 < wide <= MOST_WIDE or not 0 <= width <= MOST_CHANNELS:
        raise UserError(
            f"width {width} times {wide} is out of range: widths lie from 0 to {MOST_CHANNELS:,}, "
            f"and the factor above 0 and at most at {MOST_WIDE:,}"
        )
    return max(1, round(width * wide)) if width else 0


def initialise_convs(network: nn.Module) -> None:
    """He initialisation by fan-out, for convolutions that BN and ReLU follow."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel():
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
