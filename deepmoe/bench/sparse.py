"""How much time skipped channels save: dense, sliced beforehand, dynamic and by codes."""

import copy
import resource
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from deepmoe.bench.benchmark import Benchmark, Timed, compared, milliseconds
from deepmoe.bench.subjects import Subject
from deepmoe.cuda_graphs import GraphCache, Work
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.ops import is_half
from deepmoe.progress import followed, progress
from deepmoe.sparse import Plan, sparsify
from deepmoe.sparse.convolution import convolve_plainly
from deepmoe.sparse.executors import FixedExecutor, Parts, parts_of_route, whole_network
from deepmoe.sparse.program import Program
from deepmoe.sparse.route_groups import parts_by_route
from deepmoe.sparse.translation import translate
from deepmoe.timing import timed

TRIAL_ROUNDS = 3  # to find a contender's best way
PLANNING_RUNS = 40  # at most, until the engine has decided on its ways
SAME_GATE = 0.05  # gates that differ by this share of the largest one are another route
CAPTURING_RUNS = 3  # at least, until CUDA graphs are captured
Call = Callable[[], Tensor]

# What people are told of, in this order: key, name, meaning.
TOLD = (
    ("dense_wide", "dense", "all channels run, in the fastest way that PyTorch has here"),
    ("dense_wide_packed", "dense, in the engine", "all channels run, by the engine's fused calls"),
    ("dense_base", "dense, not widened", "the same for the network at its own width"),
    ("dynamic", "sparse", "the engine runs the channels that gates ask for, image by image"),
    ("codebook", "sparse, by codes", "the same with a few routes that are prepared beforehand"),
    ("presliced", "limit", "these channels alone, cut out beforehand: nothing is left to decide"),
)


@dataclass(frozen=True)
class SparseBenchmark(Benchmark):
    """How much time skipped channels save.

    Attributes:
        plan: which ways the engine has found to be fastest.
    """

    plan: Plan

    def timed(self) -> list[Timed]:
        """The networks that people are told of: those that differ."""
        values, found = self.values, []
        for key, name, meaning in TOLD:
            time = self._limit() if key == "presliced" else values.get(f"{key}_ms")
            if time is not None and (key != "dense_base" or values["widened"]):
                found.append(Timed(name, time, meaning))
        return found

    @property
    def sentence(self) -> str:
        """Dense and sparse, what could be reached, and whether it is due to skipped channels."""
        values = self.values
        coded = values["codebook_ms"] is not None and values["codebook_ms"] < values["dynamic_ms"]
        ms, name = values["codebook_ms" if coded else "dynamic_ms"], "sparse" + " by codes" * coded
        dense, limit = values["dense_wide_ms"], self._limit()
        end = "" if limit is None else f"; limit {milliseconds(limit)} ms"
        if limit is not None and not coded and values["ways"]["dynamic"] == "dense":
            end += "; no channel is skipped: running them all is faster here"
        times = f"dense {milliseconds(dense)} ms, {name} {milliseconds(ms)} ms"
        return f"{times}: {compared(ms, dense)}{end}"

    def _limit(self) -> float | None:
        """These channels alone, by PyTorch's calls or the engine's, whichever is faster."""
        ways = (self.values.get(f"presliced{way}_ms") for way in ("", "_packed"))
        return min((time for time in ways if time is not None), default=None)

    def setting(self) -> str:
        """Density, batch, routes, device."""
        values = self.values
        routes = f"{values['routes']} route{'s' if values['routes'] != 1 else ''}"
        threads = f", threads: {values['threads']}" if values["device"] == "cpu" else ""
        return (
            f"a batch of {values['batch']}, {values['density']:.0%} of the gated channels open, "
            f"{routes}; {values['device']}, {values['dtype']}{threads}; "
            f"largest error {values['max_error']:.1e}"
            + (f", {values['rerouted']} images on another route" if values["rerouted"] else "")
            + ("" if values["exited"] is None else f", {values['exited']:.1%} exited")
        )


def bench_sparse(
    subject: Subject, *, dtype: torch.dtype, rounds: int = 15, compile_dense: bool = True
) -> SparseBenchmark:
    """Times inference of a batch, interleaved in one process.

    Args:
        subject: networks and images, on the device to measure.
        dtype: of the base networks.
        rounds: timed runs of each contender.
        compile_dense: let `torch.compile` try too, for the dense networks.

    Returns:
        Medians in milliseconds and their spreads; the largest relative error of the outputs
        against the masked-dense model, over the images that take the same route in both, and how
        many do not (in half precision, rounding decides ties); peak memory. The dense networks
        run in their best memory format, with `torch.compile` or without, whatever is fastest.
        `_packed_ms` are the same networks by the engine's own fused calls, for a comparison of
        channels alone; `masked_ms` is the model itself, as it runs without the engine. Images that
        exit do so in the model and the engine only; a model without gates is not sliced.
    """
    # PyTorch limits how often one function is compiled, but here that is all it does.
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=1000):
        with progress("preparing the networks"):
            runs = _Contenders(subject, dtype, compile_dense)
        seconds = _interleaved(runs.calls, rounds, subject.images.device)
        errors, rerouted = zip(*runs.differences(), strict=True)
    medians = {f"{name}_ms": 1e3 * statistics.median(t) for name, t in seconds.items()}
    images = subject.images
    values = {
        **medians,
        "codebook_ms": medians.get("codebook_ms"),
        "spread_ms": {name: [1e3 * min(t), 1e3 * max(t)] for name, t in seconds.items()},
        "ways": runs.ways,
        "max_error": max(errors),
        "rerouted": max(rerouted),
        "routes": runs.routes,
        "batch": len(images),
        "input": list(images.shape[2:]),
        "density": runs.density,
        "exited": runs.exited,
        "widened": _size(subject.dynamic) != _size(subject.base),
        "codes": None if subject.coded is None else len(_codebook(subject.coded).codes),
        "device": str(images.device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "peak_memory_mb": _peak_memory(images.device) / 1e6,
    }
    return SparseBenchmark(values, runs.plan)


class _Contenders:
    """Every network, ready to run on the subject's images."""

    def __init__(self, subject: Subject, dtype: torch.dtype, compile_dense: bool) -> None:
        self.subject, self.dtype = subject, dtype
        self.device = subject.images.device
        self.graphs = GraphCache(self.device) if self.device.type == "cuda" else None
        self.ways: dict[str, str] = {}
        self.calls: dict[str, Call] = {}
        model = subject.dynamic
        gates, logits = model.route(subject.images)
        self.density, self.routes = 1.0, 1
        if gates is not None:
            self.density = sum((g > 0).float().mean().item() for g in gates) / len(gates)
            self.routes = len(parts_by_route(gates))
        self.exited = None
        if model.exit_at is not None and logits is not None:
            self.exited = model.exits(logits).float().mean().item()
        wide, base = (
            translate(copy.deepcopy(m.network).eval(), m.gating, dtype)
            for m in (model, subject.base)
        )
        self._add_dense("dense_wide", wide, whole_network(wide), compile_dense)
        self._add_dense("dense_base", base, whole_network(base), compile_dense)
        if gates is not None:
            sliced = parts_of_route(wide, [g[0] for g in gates])
            self._add_dense("presliced", wide, sliced, compile_dense)
        self.calls["masked"] = lambda: self._reference(model).logits
        self.dynamic = sparsify(model, dtype=dtype)
        self._add_sparse("dynamic", self.dynamic)
        self.coded = None
        if subject.coded is not None:
            self.coded = sparsify(subject.coded, dtype=dtype)
            self._add_sparse("codebook", self.coded)

    @property
    def plan(self) -> Plan:
        """Which ways the engine has found to be fastest."""
        return self.dynamic.plan if self.coded is None else self.dynamic.plan | self.coded.plan

    def differences(self) -> Iterable[tuple[float, int]]:
        """Each sparse model's largest relative error, and how many images it routes differently."""
        pairs = [(self.subject.dynamic, self.dynamic), (self.subject.coded, self.coded)]
        for model, sparse in pairs:
            if model is not None and sparse is not None:
                expected, ours = self._reference(model), sparse(self.subject.images)
                alike = _go_alike(expected, ours)
                logits = expected.logits.float()
                difference = (ours.logits.float() - logits)[alike].abs()
                largest = difference.max() if alike.any() else difference.new_zeros(())
                yield float(largest / logits.abs().max()), int((~alike).sum())

    def _reference(self, model: DeepMoE) -> DeepMoEOutput:
        """Outputs of the model as it is: all channels, multiplied by gates."""
        with torch.autocast(self.device.type, self.dtype, enabled=is_half(self.dtype)):
            output: DeepMoEOutput = model(self.subject.images)
            return output

    def _add_dense(self, name: str, program: Program, parts: Parts, compile_: bool) -> None:
        images = self.subject.images.to(self.dtype)
        ways: dict[str, Call] = {}
        for label, memory_format in (
            ("contiguous", torch.contiguous_format),
            ("channels last", torch.channels_last),
        ):
            executor = PlainExecutor(parts, memory_format)
            x = images.contiguous(memory_format=memory_format)

            def eager(x: Tensor, executor: PlainExecutor = executor) -> Tensor:
                return program.whole(executor, x)

            ways[label] = self._captured(eager, x)
            if compile_ and (self.device.type == "cpu" or label == "channels last"):
                compiled = torch.compile(eager, dynamic=False)
                ways[f"{label}, compiled"] = self._captured(compiled, x)
        packed = FixedExecutor(parts)  # the last x is channels last, as GPUs like it
        self.calls[f"{name}_packed"] = self._captured(lambda x: program.whole(packed, x), x)
        self.ways[name] = _fastest(ways, self.device)
        self.calls[name] = ways[self.ways[name]]

    def _add_sparse(self, name: str, sparse: Any) -> None:
        images = self.subject.images
        for number in range(PLANNING_RUNS):
            sparse(images)
            decided = sparse.planner.chosen or sparse.heads is None
            if decided and number >= CAPTURING_RUNS:
                break
        self.ways[name] = ", ".join(sorted(set(sparse.planner.chosen.values()))) or "dense"
        self.calls[name] = lambda: sparse(images).logits

    def _captured(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Call:
        graphs = self.graphs
        if graphs is None:
            return lambda: function(x)
        work = Work(object(), function, (x,))
        return lambda: graphs.run(work)


class PlainExecutor(FixedExecutor):
    """Folded layers by PyTorch's public operators: what a user would run without the engine."""

    def __init__(self, parts: Parts, memory_format: torch.memory_format) -> None:
        self.layers = {
            path: replace(layer, weight=layer.weight.contiguous(memory_format=memory_format))
            if layer.is_conv
            else layer
            for path, layer in parts.layers.items()
        }
        self.linears, self.norms, self.parameters = self.layers, parts.norms, parts.parameters

    def convolve(self, path: str, x_BCHW: Tensor) -> Tensor:
        return convolve_plainly(self.layers[path], self.layers[path].weight, x_BCHW)

    def convolve_onto(self, path: str, x_BCHW: Tensor, stream_BCHW: Tensor) -> Tensor:
        layer = self.layers[path]
        return convolve_plainly(layer, layer.weight, x_BCHW, stream_BCHW)

    def max_pool(self, x_BCHW: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
        return F.max_pool2d(x_BCHW, size, stride, padding)


def _go_alike(expected: DeepMoEOutput, ours: DeepMoEOutput) -> Tensor:
    """Which images take the same route in both, or exit in both."""
    alike_B = torch.ones(len(ours.logits), dtype=torch.bool, device=ours.logits.device)
    if expected.gates is not None and ours.gates is not None:
        theirs_BC, ours_BC = torch.cat(expected.gates, dim=1), torch.cat(ours.gates, dim=1)
        apart_B = (theirs_BC - ours_BC).abs().amax(dim=1)
        alike_B = apart_B <= SAME_GATE * theirs_BC.max().clamp_min(1e-6)
    if expected.exited is not None and ours.exited is not None:
        # The engine makes no gates for images that exit.
        alike_B = (alike_B | ours.exited) & (expected.exited == ours.exited)
    return alike_B


def _fastest(ways: dict[str, Call], device: torch.device) -> str:
    for name, call in list(ways.items()):
        try:
            call()
        except torch._dynamo.exc.BackendCompilerFailed:
            del ways[name]  # no C++ compiler on this machine
    times = _interleaved(ways, TRIAL_ROUNDS, device)
    return min(times, key=lambda name: statistics.median(times[name]))


def _interleaved(
    calls: dict[str, Call], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    # The first two warm up.
    for number in followed(range(rounds + 2), "timing", rounds + 2, "rounds"):
        for name, call in calls.items():
            _, seconds = timed(call, device)
            if number >= 2:
                times[name].append(seconds)
    return times


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _size(model: DeepMoE) -> int:
    return sum(p.numel() for p in model.network.parameters())


def _codebook(model: DeepMoE) -> Any:
    assert model.codebook is not None
    return model.codebook
