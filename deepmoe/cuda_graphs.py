"""Functions on a GPU: captured as CUDA graphs, and run at the same time on streams."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_GRAPHS = 256  # each holds memory for its activations
STREAMS = 8


class SideStream:
    """What stands under it runs while what follows does, until `join`; on a CPU, before it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.context: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            self.context = torch.cuda.stream(self.stream)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def join(self, result: Tensor) -> None:
        """Lets what follows wait for it, and use the result."""
        if self.stream is None:
            return
        here = torch.cuda.current_stream(self.stream.device)
        here.wait_stream(self.stream)
        if not torch.cuda.is_current_stream_capturing():
            result.record_stream(here)


def on_its_way(numbers: Tensor) -> Callable[[], list[Any]]:
    """Brings numbers to the CPU while a GPU goes on; the result waits for them, and gives them."""
    if not numbers.is_cuda:
        return numbers.tolist
    here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    here.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[Any]:
        arrived.synchronize()
        return here.tolist()

    return read


class Work(NamedTuple):
    """A function of tensors, and what to call it with."""

    name: Hashable  # the same name always means the same function
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    lane: int = 0  # works of one lane never run at the same time


def one_after_another(works: Sequence[Work]) -> list[Any]:
    """Runs functions as they are."""
    return [work.function(*work.inputs) for work in works]


class GraphCache:
    """Runs functions; one that comes with inputs of the same shapes again is captured."""

    def __init__(self, device: torch.device) -> None:
        self.graphs: OrderedDict[Hashable, CapturedCall] = OrderedDict()
        self.seen: set[Hashable] = set()
        self.streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]

    def run(self, work: Work) -> Any:
        """Runs a function; its result is good until it is called again."""
        return self._prepared(work)(*work.inputs)

    def run_all(self, works: Sequence[Work]) -> list[Any]:
        """Runs functions, at once if all are captured; results are good until the next run."""
        ready = [self._prepared(work) for work in works]
        if not all(isinstance(call, CapturedCall) for call in ready):
            return [call(*work.inputs) for call, work in zip(ready, works, strict=True)]
        here, results = torch.cuda.current_stream(), []
        for call, work in zip(ready, works, strict=True):
            stream = self._stream_of(work)
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                results.append(call(*work.inputs))
        for stream in self.streams:
            here.wait_stream(stream)
        return results

    def _prepared(self, work: Work) -> Callable[..., Any]:
        key = (work.name, *((x.shape, x.dtype) for x in work.inputs))
        if key in self.graphs:
            self.graphs.move_to_end(key)
            return self.graphs[key]
        if key not in self.seen:  # capturing pays only for what comes again
            self.seen.add(key)
            return work.function
        self.graphs[key] = CapturedCall(
            work.function, work.inputs, self._stream_of(work), warm_up=True
        )
        if len(self.graphs) > MOST_GRAPHS:
            self.graphs.popitem(last=False)
        return self.graphs[key]

    def _stream_of(self, work: Work) -> torch.cuda.Stream:
        return self.streams[work.lane % STREAMS]


class CapturedCall:
    """A function captured for inputs of certain shapes; its result lies in the same memory always.

    A graph keeps the working memory of the stream that it was captured on. Graphs that run at the
    same time must not share it: some kernels would wait for each other for ever.

    Args:
        function: of tensors.
        inputs: such as it will be called with.
        stream: to capture on.
        warm_up: call it once before, so that libraries set themselves up.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        stream: torch.cuda.Stream,
        *,
        warm_up: bool,
    ) -> None:
        self.function = function  # keeps its weights alive
        self.inputs = [x.clone() for x in inputs]
        if warm_up:
            run_on(stream, function, *self.inputs)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of data loaders, may go on meanwhile.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.result = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.result


def run_on(stream: torch.cuda.Stream, function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Calls a function on a stream, between what is before and after it on this one."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = function(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    return result
