"""Memory of a network as it is kept: dense, masked, narrowed, or a small network for each code.

Bytes are measured in two ways that come out the same at every run: the size of a safetensors file
with the weights, and the most that is alive at a time while one image runs (on a CPU the tensors
that PyTorch makes, on a GPU what its allocator counts), weights included.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deepmoe.deploy import static_network
from deepmoe.evaluation.narrowing import narrowed_model
from deepmoe.graph import Gating, evaluation_mode
from deepmoe.hard_moe import HardMoE
from deepmoe.model import DeepMoE


@dataclass(frozen=True)
class MemoryVariant:
    """One way to keep a network.

    Attributes:
        name: dense, masked, narrowed, codebook, pruned, exits or experts.
        meaning: what is kept, in words.
        parameters: numbers that were learnt.
        weight_bytes: of parameters and buffers.
        file_bytes: of a safetensors file with them; of all files where there are several.
        peak_bytes: most that is alive at a time while one image runs, weights included.
    """

    name: str
    meaning: str
    parameters: int
    weight_bytes: int
    file_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Memory:
    """The variants of one network, measured on one image of a size."""

    size: tuple[int, int]
    device: str
    variants: tuple[MemoryVariant, ...]

    def __getitem__(self, name: str) -> MemoryVariant:
        return next(variant for variant in self.variants if variant.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)


@torch.no_grad()
def measure_memory(
    model: DeepMoE, x_1CHW: Tensor, used: Sequence[np.ndarray] | None = None
) -> Memory:
    """Measures every way to keep a model that there is.

    Args:
        model: any; nothing in it is changed.
        x_1CHW: one image, normalised.
        used: for each gated layer, which channels run for any image; `used_channels` gives them.
            Without, there is no narrowed network.
    """
    x_1CHW = model.as_input(x_1CHW[:1])
    with evaluation_mode(model):
        variants = [_dense(model, x_1CHW)]
        kind = _kind(model)
        if kind is not None:
            variants.append(_measured(*kind, model, x_1CHW))
        if model.gated and not model.on_the_way:
            variants += _smaller(model, x_1CHW, used)
    size = (x_1CHW.shape[-2], x_1CHW.shape[-1])
    return Memory(size, x_1CHW.device.type, tuple(variants))


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a call has alive at a time, beyond what was there before it."""
    torch.clear_autocast_cache()  # copies of weights that an earlier call has made are its own
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveTensors() as live:
        run()
    return live.peak


def weight_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers; what several share counts once."""
    storages = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class _LiveTensors(TorchDispatchMode):
    """Follows the memory of tensors that operations make, until nobody holds them any more."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        before = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in before and key not in self._known:
                self._known.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in _pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _kind(model: DeepMoE) -> tuple[str, str] | None:
    """What the model is as it stands, by name and in words; `None` for a dense network."""
    if isinstance(model, HardMoE):
        return "experts", f"{len(model.network)} experts, and the network that chooses one"
    if model.gated:
        return "masked", "all channels, what makes the gates; closed channels are zeroed"
    if model.unpruned is not None:
        first = "" if model.embedding is None else ", and the embedding that may answer first"
        return "pruned", f"the channels that pruning has left{first}"
    if model.embedding is not None:
        return "exits", "the network, and the embedding that may answer first"
    return None


def _dense(model: DeepMoE, x_1CHW: Tensor) -> MemoryVariant:
    network, graph = model.one_network, model.gating.graph
    told = "the base network with all channels, without embedding and gates"
    if model.unpruned is not None:
        graph, told = model.unpruned, "the network before it was pruned"
        network = copy.deepcopy(graph.skeleton).to_empty(device=x_1CHW.device).eval()
    gating = Gating(graph, ())  # the code that the others run
    return _measured("dense", told, network, x_1CHW, run=lambda: gating(network, x_1CHW, None))


def _smaller(
    model: DeepMoE, x_1CHW: Tensor, used: Sequence[np.ndarray] | None
) -> list[MemoryVariant]:
    variants = []
    if used is not None:
        told = "masked, without the channels that no image uses"
        small = narrowed_model(model, used)
        variants.append(_measured("narrowed", told, small, x_1CHW))
    if model.codebook is not None:
        variants.append(_codebook(model, x_1CHW))
    return variants


def _codebook(model: DeepMoE, x_1CHW: Tensor) -> MemoryVariant:
    """Networks are made one after the other: all together may not fit where one does."""
    assert model.codebook is not None
    choosing = nn.ModuleList([*model.routing_modules(), model.codebook])
    parts = [_measured("", "", choosing, x_1CHW, run=lambda: model.route(x_1CHW))]
    for code in model.codebook.codes.unbind():
        parts.append(_measured("", "", static_network(model, code), x_1CHW))
    weights = sum(part.weight_bytes for part in parts)
    return MemoryVariant(
        name="codebook",
        meaning=f"a small network for each of {len(parts) - 1} routes, and what chooses one",
        parameters=sum(part.parameters for part in parts),
        weight_bytes=weights,
        file_bytes=sum(part.file_bytes for part in parts),
        peak_bytes=weights + max(part.peak_bytes - part.weight_bytes for part in parts),
    )


def _measured(
    name: str,
    meaning: str,
    module: nn.Module,
    x_1CHW: Tensor,
    run: Callable[[], object] | None = None,
) -> MemoryVariant:
    tensors = {key: t.detach().cpu().clone().contiguous() for key, t in module.state_dict().items()}
    weights = weight_bytes(module)
    working = peak_bytes(run or (lambda: module(x_1CHW)), x_1CHW.device)
    parameters = sum(p.numel() for p in module.parameters())
    return MemoryVariant(name, meaning, parameters, weights, len(save(tensors)), weights + working)
