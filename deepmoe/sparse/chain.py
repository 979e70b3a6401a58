"""A network without gates that runs one image at a time: its convolutions in one call.

A library's convolution takes ten to twenty microseconds to be called, and as long again to set up
its threads. In a small network that is half of the time. Here the tasks of all layers are written
down once, with memory that stays, and then run one after the other by compiled code.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmoe.sparse.direct import DirectConvolution, are_planes, direct_runs
from deepmoe.sparse.executors import BesideFixed, Executor, FixedExecutor
from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.planner import Planner
from deepmoe.sparse.stream import StreamedWeights, stream_pays
from deepmoe.sparse.threads import (
    Argument,
    Task,
    address_of,
    block_of,
    call_on_threads,
    some_of,
)

WAYS = LIBRARY, CHAINED = "library", "chained"
MOST_SIZES = 8  # of images: each has memory of its own
WARM_UP = 2  # runs of each way before it is timed: the first one compiles


class Chain:
    """Tasks that are run one after the other, by one call.

    Its `add` takes the place of `run_on_threads`: what it is given is run later, again and again.
    """

    def __init__(self) -> None:
        self.tasks: list[tuple[Task, int, Sequence[Argument]]] = []
        self.blocks = np.zeros((0, 0), dtype=np.int64)
        self.progress = np.zeros(0, dtype=np.int64)
        self.list = np.zeros(0, dtype=np.int64)
        self.lists: list[np.ndarray] = []

    def add(self, task: Task, pieces: int, arguments: Sequence[Argument]) -> None:
        """Writes a task down; its arrays are kept."""
        self.tasks.append((task, pieces, arguments))

    @property
    def arrays(self) -> list[Tensor]:
        """All that its tasks read and write."""
        return [a for _, _, arguments in self.tasks for a in arguments if isinstance(a, Tensor)]

    def close(self) -> None:
        """Makes it ready to be run: no more tasks are added."""
        made = [block_of(pieces, arguments) for _, pieces, arguments in self.tasks]
        self.blocks = np.zeros((len(made), max(map(len, made), default=1)), dtype=np.int64)
        for block, values in zip(self.blocks, made, strict=True):
            block[: len(values)] = values
        functions = np.array([address_of(task) for task, _, _ in self.tasks], dtype=np.int64)
        starts = self.blocks.ctypes.data + self.blocks.strides[0] * np.arange(len(made))
        self.progress = np.zeros((2, len(made)), dtype=np.int64)
        self.lists = [functions, starts.astype(np.int64)]
        arrays = (*self.lists, *self.progress)
        self.list = np.array([len(made), *(a.ctypes.data for a in arrays)], dtype=np.int64)

    def run(self) -> None:
        """Runs all tasks, on PyTorch's threads."""
        from deepmoe.sparse.chain_kernel import chain_kernel

        self.blocks[:, 0] = 0  # no piece is claimed yet
        self.progress[:] = 0
        call_on_threads(chain_kernel(), self.list, torch.get_num_threads())


class Reply(NamedTuple):
    """What an executor is to answer to one question."""

    result: Tensor  # memory that a chain fills
    begins: Chain | None  # to be run before, where this is the first of its layers
    entries: tuple[Tensor, ...]  # memory of that chain's inputs


class ChainedNetwork:
    """A network for images of one size, with as many of its layers in chains as can be.

    Args:
        program: runs the network with an executor, on an image.
        layers: by path.
        plain: runs what is in no chain.
        x_BCHW: an image.
    """

    def __init__(
        self,
        program: Callable[[Executor, Tensor], Tensor],
        layers: dict[str, FoldedLayer],
        plain: FixedExecutor,
        x_BCHW: Tensor,
    ) -> None:
        self.program = program
        self.plain = plain
        builder = _Builder(layers, plain)
        program(builder, x_BCHW)  # what it gives is nothing yet
        self.replies = builder.replies
        made = [reply for reply in self.replies if reply is not None]
        chains = [reply.begins for reply in made if reply.begins is not None]
        for chain in chains:
            chain.close()
        self.layers, self.chains = len(made), len(chains)  # calls taken over, and by how many
        self.memory = {_storage(reply.result) for reply in made}
        used = {_storage(a): a.untyped_storage().nbytes() for c in chains for a in c.arrays}
        for layer in layers.values():
            used.pop(_storage(layer.weight), None)  # there in any case
        self.bytes = sum(used.values())

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        """What the network gives."""
        result = self.program(_Replies(self.replies, self.plain), x_BCHW)
        # Memory of a chain is written to by its next run.
        return result.clone() if _storage(result) in self.memory else result


class _Builder(BesideFixed):
    """Writes down the tasks of a network, in its order.

    A layer that works on results of the chain at hand goes on with it. Any other one that a chain
    can run begins a new one, whose inputs are copied. What no chain can run is done as ever.
    """

    def __init__(self, layers: dict[str, FoldedLayer], fixed: FixedExecutor) -> None:
        super().__init__(fixed)
        self.layers = layers
        self.chain = Chain()
        self.made: list[tuple[Tensor, int]] = []  # what the chain will have filled, unchanged
        self.replies: list[Reply | None] = []  # to each question; `None` where no chain has one

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        if not self._can_run(path, x_BCHW):
            return self._plain("convolve", path, x_BCHW)
        return self._joined(partial(self._convolved, path), x_BCHW)

    def convolve_onto(self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor) -> Tensor:
        if not self._can_run(path, x_BCHW, onto=True):
            return self._plain("convolve_onto", path, x_BCHW, stream_BCHW)
        return self._joined(partial(self._convolved, path), x_BCHW, stream_BCHW)

    def convolve_and_pool(self, path: str, x_BCHW: Tensor, size: int, stride: int) -> Tensor:
        if not self._can_run(path, x_BCHW):
            return self._plain("convolve_and_pool", path, x_BCHW, size, stride)
        return self._joined(lambda x: self._pooled(self._convolved(path, x), size, stride), x_BCHW)

    def max_pool(self, x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
        if padding or not self._is_made(x_BCHW):
            return self._plain("max_pool", x_BCHW, size, stride, padding)
        return self._joined(lambda x: self._pooled(x, size, stride), x_BCHW)

    def _can_run(self, path: str, x_BCHW: Tensor, *, onto: bool = False) -> bool:
        layer = self.layers[path]
        if layer.activation not in ("", "relu"):  # kernels know no others
            return False
        return direct_runs(layer, x_BCHW) or (not onto and stream_pays(layer, x_BCHW))

    def _plain(self, method: str, *arguments: Any) -> Tensor:
        self.replies.append(None)
        return getattr(self.fixed, method)(*arguments)

    def _joined(self, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The memory that a layer's tasks will fill, in this chain or in a new one."""
        begins: Chain | None = None
        entries: tuple[Tensor, ...] = ()
        # Tensors of inference mode would not tell when they are changed.
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            if not all(map(self._is_made, inputs)):
                begins = self.chain = Chain()
                inputs = entries = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in inputs)
                self.made = []
            result = layer(*inputs)
        self.made.append((result, result._version))
        self.replies.append(Reply(result, begins, entries))
        return result

    def _is_made(self, x: Tensor) -> bool:
        """Whether it is just what the chain fills: the network may change that in place."""
        return any(x is result and x._version == version for result, version in self.made)

    def _convolved(self, path: str, x_BCHW: Tensor, onto: Tensor | None = None) -> Tensor:
        layer = self.layers[path]
        if not direct_runs(layer, x_BCHW):
            x_HWC = self._channels_last(x_BCHW)
            return StreamedWeights(layer)(layer, x_HWC, None, None, None, None, self.chain.add)
        # Forms of its own: memory that several layers share may be exchanged for more of it.
        direct = DirectConvolution(layer, tuple(x_BCHW.shape[2:]), {})
        wide, step = direct.form.width, direct.step
        if direct.as_it_is:
            x_BCHW = self._in_planes(x_BCHW, wide, step)
        if onto is not None:
            onto = self._in_planes(onto, wide, step)
        return direct(x_BCHW, onto, None, None, None, self.chain.add)

    def _in_planes(self, x_BCHW: Tensor, wide: int, step: int) -> Tensor:
        """The same values in rows of this width, such that whole vectors can be read."""
        from deepmoe.sparse.numba_kernels import arrange

        if are_planes(x_BCHW, wide, step):
            return x_BCHW
        _, channels, height, width = x_BCHW.shape
        y, x = np.divmod(np.arange(step), wide)
        inside = (y < height) & (x < width)
        places = np.where(inside, y * x_BCHW.stride(2) + x * x_BCHW.stride(3), -1)
        planes = torch.empty(channels, step, dtype=torch.float32)
        arrays = (x_BCHW, torch.from_numpy(places.astype(np.int32)), planes)
        sizes = (step, x_BCHW.stride(1), some_of(channels))
        self.chain.add(arrange.ctypes, channels, [*sizes, *arrays])
        return planes.as_strided((1, channels, height, width), (channels * step, step, wide, 1))

    def _channels_last(self, x_BCHW: Tensor) -> Tensor:
        from deepmoe.sparse.numba_kernels import channels_last

        _, channels, height, width = x_BCHW.shape
        out = torch.empty(1, height, width, channels, dtype=torch.float32)
        strides = (x_BCHW.stride(1), x_BCHW.stride(2))
        self.chain.add(channels_last.ctypes, height, [channels, width, *strides, x_BCHW, out])
        return out.permute(0, 3, 1, 2)

    def _pooled(self, x_BCHW: Tensor, size: int, stride: int) -> Tensor:
        from deepmoe.sparse.numba_kernels import max_pool

        _, channels, *sides = x_BCHW.shape
        height, width = ((n - size) // stride + 1 for n in sides)
        out = torch.empty(1, channels, height, width, dtype=torch.float32)
        shape = (size, stride, height, width, x_BCHW.stride(1), x_BCHW.stride(2))
        self.chain.add(max_pool.ctypes, channels, [*shape, some_of(channels), x_BCHW, out])
        return out


class _Replies(BesideFixed):
    """Gives what chains fill, and runs them when their first layer is asked for."""

    def __init__(self, replies: Sequence[Reply | None], fixed: FixedExecutor) -> None:
        super().__init__(fixed)
        self.replies = iter(replies)

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        reply = self._next(x_BCHW)
        return super().convolve(path, x_BCHW) if reply is None else reply

    def convolve_onto(self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor) -> Tensor:
        reply = self._next(x_BCHW, stream_BCHW)
        return super().convolve_onto(path, x_BCHW, stream_BCHW) if reply is None else reply

    def convolve_and_pool(self, path: str, x_BCHW: Tensor, size: int, stride: int) -> Tensor:
        reply = self._next(x_BCHW)
        if reply is not None:
            return reply
        return self.fixed.convolve_and_pool(path, x_BCHW, size, stride)

    def max_pool(self, x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
        reply = self._next(x_BCHW)
        return self.fixed.max_pool(x_BCHW, size, stride, padding) if reply is None else reply

    def _next(self, *inputs: Tensor) -> Tensor | None:
        reply = next(self.replies)
        if reply is None:
            return None
        if reply.begins is not None:
            for entry, x in zip(reply.entries, inputs, strict=True):
                entry.copy_(x)
            reply.begins.run()
        return reply.result


def _storage(array: Tensor) -> int:
    """What tells the memory of arrays apart, of which several may be views."""
    return array.untyped_storage().data_ptr()


class StaticNetwork:
    """A network without gates. Single images on a CPU go by a chain, where that is faster.

    Args:
        name: of the cases that are planned for.
        program: runs it with an executor.
        layers: by path.
        plain: runs its layers one by one.
        planner: chooses the faster way.
    """

    def __init__(
        self,
        name: str,
        program: Callable[[Executor, Tensor], Tensor],
        layers: dict[str, FoldedLayer],
        plain: FixedExecutor,
        planner: Planner[Any],
    ) -> None:
        self.name = name
        self.program = program
        self.layers = layers
        self.plain = plain
        self.planner = planner
        self.chained: dict[Hashable, ChainedNetwork] = {}  # by size and threads

    @property
    def bytes(self) -> int:
        """Memory of the chains, weights that are there anyway left out."""
        return sum(network.bytes for network in self.chained.values())

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        """What the network gives for images."""
        fits = len(x_BCHW) == 1 and x_BCHW.device.type == "cpu" and x_BCHW.dtype == torch.float32
        if not fits or torch.compiler.is_compiling():  # addresses of memory can't be traced
            return self.program(self.plain, x_BCHW)
        case = (self.name, *x_BCHW.shape[1:], torch.get_num_threads())
        ways: dict[str, Callable[[], Tensor]] = {LIBRARY: lambda: self.program(self.plain, x_BCHW)}
        if case in self.chained or len(self.chained) < MOST_SIZES:
            ways[CHAINED] = lambda: self._run_chained(case, x_BCHW)
        result = self.planner.run(case, ways, x_BCHW.device, WARM_UP)
        if self.planner.chosen.get(case) == LIBRARY:
            self.chained.pop(case, None)  # its memory is for other sizes
        return result

    def _run_chained(self, case: Hashable, x_BCHW: Tensor) -> Tensor:
        if case not in self.chained:
            self.chained[case] = ChainedNetwork(self.program, self.layers, self.plain, x_BCHW)
        return self.chained[case](x_BCHW)
