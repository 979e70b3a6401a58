"""Gates in a network: where they stand, and the code that runs with them.

A gate multiplies what a layer reads: z = sum_i g_i (K_i * x_i), the paper's sum over experts. There
nothing has to keep zero at zero, so that it may stand behind any activation, norm or pooling. A
closed gate means that no layer reads the channel, so that none needs to make it.
"""

import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from deepmoe.errors import UserError
from deepmoe.graph.graph import Graph, Group, Layer
from deepmoe.graph.narrow import narrowed, narrowed_graph, with_one_of_each
from deepmoe.graph.operations import name_of
from deepmoe.graph.running import DROPOUTS, Decide, FeatureRun, Run, Site, progressions

READ_BY_CLASSIFIER = "is read by the classifier"
LEAST_SHARE = 1e-3  # of the network's MACs: less is not worth a gate


class NothingToGate(UserError):
    """A network none of whose channels can be switched off."""


@dataclass(frozen=True, eq=False)
class Gating:
    """A network's graph, with gates at some of its groups.

    Attributes:
        graph: of the network.
        gated: numbers of the groups, in the order of the gates.
    """

    graph: Graph
    gated: tuple[int, ...]

    def __post_init__(self) -> None:
        with torch._C.DisableTorchFunction():  # torch.compile could not work them out on its way
            _ = self.widths, self.sites, self._code

    def __deepcopy__(self, memo: object) -> "Gating":
        return self  # nothing in it ever changes

    def __reduce__(self) -> tuple[Any, ...]:
        return Gating, (self.graph, self.gated)  # what is derived is derived again

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Gates of each gated group."""
        return tuple(self.graph.groups[number].width for number in self.gated)

    @property
    def names(self) -> tuple[str, ...]:
        """What the gated groups are called: by the layers that make them."""
        return tuple(self.graph.groups[number].name for number in self.gated)

    def __call__(self, module: nn.Module, x_BCHW: Tensor, gates: Sequence[Tensor] | None) -> Tensor:
        """Logits of the network, with gates or (`None`) without."""
        self._check_images(x_BCHW)
        return self._code(module, Run(self.sites, gates, module.training), x_BCHW)

    def run_with(
        self, module: nn.Module, x_BCHW: Tensor, decide: Decide
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits of the network under gates that are made on the way, and these gates.

        Args:
            module: the network.
            x_BCHW: images.
            decide: makes the gates of a group, once: when its first maker is about to run.
        """
        self._check_images(x_BCHW)
        run = FeatureRun(self.sites, module.training, self.makes, self.widths, decide)
        logits = self.feature_code(module, run, x_BCHW)
        return logits, run.all_gates(x_BCHW)

    def _check_images(self, x_BCHW: Tensor) -> None:
        if x_BCHW.dim() != 4 or x_BCHW.shape[1] != self.graph.colours:
            raise UserError(
                f"images come as (images, {self.graph.colours}, height, width), "
                f"not as {tuple(x_BCHW.shape)}"
            )
        self.graph.check_size((x_BCHW.shape[-2], x_BCHW.shape[-1]))

    def check(self, gates: Sequence[Tensor]) -> None:
        """Refuses gates that don't fit this network."""
        found = [g.shape[1] if g.dim() == 2 else None for g in gates]
        if found != list(self.widths):
            raise UserError(f"expected gates of widths {list(self.widths)}, got {found}")

    def narrow(
        self, module: nn.Module, masks: Sequence[Tensor]
    ) -> tuple[nn.Module, "Gating", list[Tensor]]:
        """Removes channels physically.

        Args:
            module: the network.
            masks: for each gated group, which units to keep.

        Returns:
            A smaller network of the same class with its own copy of the weights, its gating, and
            which units are left of each group: at least one, whatever the mask says. With the gates
            of those it gives what this one gives when the gates of the others are zero.
        """
        keep = self.keep(masks)
        keep, _ = with_one_of_each(self.graph, keep)
        small = Gating(narrowed_graph(self.graph, keep), self.gated)
        left = [part.nonzero().flatten() for part in self.by_group(keep)]
        return narrowed(self.graph, module, self.keep(masks)), small, left

    def by_group(self, values: Tensor) -> list[Tensor]:
        """Values of all units, as those of each gated group."""
        starts = [self.graph.offsets[number] for number in self.gated]
        return [values[s : s + w] for s, w in zip(starts, self.widths, strict=True)]

    def keep(self, masks: Sequence[Tensor]) -> Tensor:
        """Which units stay, from a mask for each gated group."""
        if [len(mask) for mask in masks] != list(self.widths):
            raise UserError(f"keep must hold masks of lengths {list(self.widths)}")
        keep = torch.ones(self.graph.offsets[-1], dtype=torch.bool)
        for number, mask in zip(self.gated, masks, strict=True):
            start = self.graph.offsets[number]
            keep[start : start + len(mask)] = mask.detach().to("cpu", torch.bool)
        return keep

    @cached_property
    def gate_of_unit(self) -> Tensor:
        """For each unit, which of all gates side by side it has; -1 for none. The last is -1."""
        found = torch.full((self.graph.offsets[-1] + 1,), -1)
        start = 0
        for number, width in zip(self.gated, self.widths, strict=True):
            first = self.graph.offsets[number]
            found[first : first + width] = torch.arange(start, start + width)
            start += width
        return found

    def gate_of_channel(self, units: Tensor) -> Tensor:
        """For channels of these units, the number of the group in `gated`; -1 for none."""
        numbers = torch.full((len(self.graph.groups) + 1,), -1)
        numbers[list(self.gated)] = torch.arange(len(self.gated))
        groups = torch.where(units < 0, len(self.graph.groups), self.graph.group_of_unit[units])
        return numbers[groups]

    @cached_property
    def sites(self) -> tuple[Site | None, ...]:
        """For each layer, where gates multiply its input; `None` where none do."""
        return tuple(self._site(layer) for layer in self.graph.layers)

    def _site(self, layer: Layer) -> Site | None:
        numbers = self.gate_of_unit[layer.ins]
        if layer.passes_on or not bool((numbers >= 0).any()):
            return None
        dim = 1 if layer.is_conv else -1
        starts = [0, *itertools.accumulate(self.widths[:-1])]
        pieces: list[int | None] = []
        lengths: list[int] = []
        at, listed = 0, numbers.tolist()
        while at < len(listed):
            if listed[at] < 0:
                end = next((k for k in range(at, len(listed)) if listed[k] >= 0), len(listed))
                pieces.append(None)
                lengths.append(end - at)
            elif listed[at] in starts:
                gate = starts.index(listed[at])
                width = self.widths[gate]
                end = at + width
                if listed[at:end] != list(range(listed[at], listed[at] + width)):
                    break
                pieces.append(gate)
                lengths.append(width)
            else:
                break
            at = end
        if at == len(listed):
            return Site(dim, tuple(pieces), tuple(lengths))
        none = sum(self.widths)
        return Site(dim, index=progressions([none if number < 0 else number for number in listed]))

    @cached_property
    def _code(self) -> Callable[..., Tensor]:
        """The network's operations as a function of its module, a `Run` and images."""
        return compiled(self._with_gates())

    @cached_property
    def feature_code(self) -> Callable[..., Tensor]:
        """The same for a `FeatureRun`, which is shown what makers of gated groups read."""
        return compiled(self._with_gates(looks=True))

    @cached_property
    def makes(self) -> dict[int, tuple[int, ...]]:
        """By the number of a layer, the gated groups whose first maker it is."""
        paths = [layer.path for layer in self.graph.layers]
        found: dict[int, tuple[int, ...]] = {}
        for gate, number in enumerate(self.gated):
            first = min(paths.index(path) for path in self.graph.groups[number].makers)
            found[first] = (*found.get(first, ()), gate)
        return found

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """For each gated group, how many channels its first maker reads."""
        makers = {gate: layer for layer, gates in self.makes.items() for gate in gates}
        return tuple(len(self.graph.layers[makers[g]].ins) for g in range(len(self.gated)))

    def _with_gates(self, *, looks: bool = False) -> fx.Graph:
        copied = fx.Graph()
        run = copied.placeholder("run")
        copied.output(copied.graph_copy(self.graph.program, {}))
        sites = {
            layer.node: number
            for number, layer in enumerate(self.graph.layers)
            if self.sites[number] is not None
        }
        makers = {self.graph.layers[number].node: number for number in self.makes} if looks else {}
        made: dict[tuple[fx.Node, Site], fx.Node] = {}
        for node in list(copied.nodes):
            if node.name in sites:
                source, site = node.args[0], self.sites[sites[node.name]]
                assert isinstance(source, fx.Node) and site is not None
                if (source, site) not in made:
                    with copied.inserting_before(node):
                        made[source, site] = copied.call_method(
                            "gate", (run, sites[node.name], source)
                        )
                node.args = (made[source, site], *node.args[1:])
            if node.name in makers:
                dim = 1 if self.graph.layers[makers[node.name]].is_conv else -1
                with copied.inserting_before(node):
                    copied.call_method("look", (run, makers[node.name], node.args[0], dim))
            if node.name not in sites and node.op in ("call_function", "call_method"):
                _follow_mode(copied, run, node, self.graph.skeleton)
        return copied


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The function that a graph stands for; its first argument is the module that it runs."""
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, "<captured network>", "exec"), scope)
    return types.FunctionType(scope["forward"].__code__, scope)


def choose(graph: Graph, where: str | Sequence[str | int]) -> Gating:
    """Gates at groups of a network.

    Args:
        graph: of the network.
        where: `inner` gates what no addition joins, such as what stays inside of a residual block;
            `all` also residual streams; a list names groups, by a layer that makes them or by
            number. What the last layer reads is gated only where it is named: such a gate would
            hand the embedding's guess to the logits.

    Raises:
        UserError: where nothing can be gated, or a name is unknown.
    """
    if where not in ("inner", "all") and not isinstance(where, list | tuple):
        raise UserError(f"where is inner, all or a list of layers, not {where!r}")
    if not isinstance(where, str):
        if not where:
            raise UserError("where is a list without any layer: no gates would be left")
        named = {_named(graph, name).number for name in where}
        return _gating(graph, tuple(sorted(named)))
    chosen = open_groups(graph, where)
    if not chosen:
        reasons = {f"what {g.name} makes {why_not(graph, g, where)}" for g in graph.groups}
        raise NothingToGate(
            "nothing in this network can be gated (deepmoe describe tells why): "
            + "; ".join(sorted(reasons)[:3])
        )
    return _gating(graph, tuple(chosen))


@lru_cache(maxsize=64)
def _gating(graph: Graph, gated: tuple[int, ...]) -> Gating:
    """Made once for networks that share their graph, as those of the zoo do: it takes long."""
    return Gating(graph, gated)


@lru_cache(maxsize=64)
def prunable(graph: Graph) -> Gating:
    """Gates at all groups from which channels can be removed for good.

    What the last layer reads is one of them, and so are residual streams: a choice that is the same
    for all images tells nothing about them.
    """
    reasons = {g.number: why_not(graph, g) for g in graph.groups}
    chosen = [number for number, why in reasons.items() if why in (None, READ_BY_CLASSIFIER)]
    if not chosen:
        raise NothingToGate(
            "no channel of this network can be removed (deepmoe describe tells why)"
        )
    return _gating(graph, tuple(chosen))


def with_kept(
    network: nn.Module, graph: Graph, kept: Sequence[int] | None
) -> tuple[nn.Module, Graph]:
    """A network with so many channels left of each group that can spare some; `None` leaves all.

    Which ones are left does not matter here: weights will be loaded.
    """
    if kept is None:
        return network, graph
    gating = prunable(graph)
    check_kept(kept, gating)
    with torch.device("cpu"):  # numbers of channels are needed, also of a network without weights
        masks = [torch.arange(w) < n for w, n in zip(gating.widths, kept, strict=True)]
        small, left, _ = gating.narrow(network, masks)
    return small, left.graph


def check_kept(kept: Sequence[int], gating: Gating) -> None:
    """Refuses numbers of channels that can't be left of the groups that a gating covers."""
    fits = len(kept) == len(gating.widths) and all(
        isinstance(left, int) and 1 <= left <= width
        for left, width in zip(kept, gating.widths, strict=True)
    )
    if not fits:
        raise UserError(
            f"kept is one number for each of {len(gating.widths)} groups of channels, "
            f"at most {list(gating.widths)}"
        )


def open_groups(graph: Graph, where: str) -> list[int]:
    """Numbers of the groups that `inner` or `all` gates."""
    return [group.number for group in graph.groups if why_not(graph, group, where) is None]


def why_not(graph: Graph, group: Group, where: str = "all") -> str | None:
    """Why a group is not gated; `None` if it is."""
    if group.pinned is not None:
        return group.pinned
    if graph.layers[-1].path in group.readers:
        return READ_BY_CLASSIFIER
    if not group.readers:
        return "is read by no layer"
    if group.is_stream and where == "inner":
        return "reaches a residual stream"
    if _share(graph, group) < LEAST_SHARE:
        return "costs next to nothing"
    return None


def _named(graph: Graph, name: str | int) -> Group:
    by_name = [g for g in graph.groups if name in (g.number, g.name)]
    for group in by_name or [g for g in graph.groups if name in g.makers]:
        if group.pinned is not None:
            raise UserError(f"what {group.name} makes can't be gated: it {group.pinned}")
        return group
    known = ", ".join(group.name for group in graph.groups[:5])
    shown = repr(name)[:80]
    raise UserError(f"no group of channels is made by {shown}; there are {known} and others")


def _share(graph: Graph, group: Group) -> float:
    """Of the network's weights times positions, at the smallest size that was looked at."""
    costs = graph.macs(graph.tried_size)
    touched = sum(costs[path] for path in {*group.makers, *group.readers})
    return touched / max(1, sum(costs.values()))


def _follow_mode(graph: fx.Graph, run: fx.Node, node: fx.Node, root: nn.Module) -> None:
    name = name_of(node, root)
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    if name not in DROPOUTS or training:  # in evaluation, too: it is meant to be always on
        return
    rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    with graph.inserting_before(node):
        new = graph.call_method("dropout", (run, name, node.args[0], rate))
    node.replace_all_uses_with(new)
    graph.erase_node(node)
